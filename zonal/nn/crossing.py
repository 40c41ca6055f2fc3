"""Which layers of attention can read a context, tokens other than their own."""

from zonal.algebra import Operator


def refusal(operator: Operator, *, rotary: bool, conv: bool, same_size: bool) -> str | None:
    """Why a layer cannot read a context, or None: what it does needs the order of the tokens of one sequence.

    rotary, conv: whether it has them. same_size: whether tokens of the context are of the size of its own.
    """
    if rotary:
        return (
            "rotary positions compare places in one sequence, and a context has places of its own. Use rotary=False, "
            "and add positions to x and to the context."
        )
    if conv:
        return "a short convolution (conv) reads earlier tokens of x, and a context has none of them. Use conv=0."
    if operator.prior:
        names = ", ".join(type(prior).__name__ for prior in operator.prior)
        why = f"its prior {names} is of places in one sequence. Drop the prior, or use another operator."
    elif operator.tags.window:
        why = "its window ends with the query's own key. Use an operator without a window, such as its far kernel."
    elif operator.tags.family == "tree":
        why = "its tree is of one sequence of tokens. Use an operator without a tree."
    elif operator.score.deaths:
        why = "its neighbourhoods are of earlier tokens of one sequence. Use another score."
    elif operator.score.one_map and not same_size:
        why = "one map makes its queries and keys, so that x and the context must be of one size. Project one of them."
    else:
        return None
    return f"operator {operator.name!r} cannot read a context (cross-attention): {why}"


__all__ = ["refusal"]
