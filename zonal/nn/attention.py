"""The attention layer: projections around any operator."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from zonal.algebra import definition
from zonal.algebra.anchor import Count, PlanAnchor, TopK
from zonal.algebra.declaration import require_whole
from zonal.algebra.named import in_use, operator_of
from zonal.algebra.operator import LayerInit, Operator
from zonal.algebra.prior import Decay
from zonal.attention import attention
from zonal.errors import ArgumentError
from zonal.execution.call import Call, prepare, weighted
from zonal.execution.mask import Masses
from zonal.execution.paths import dense
from zonal.memory import Criterion, KeyValues, Memory, Reading
from zonal.memory.weights import weighed, weighs_keys
from zonal.nn import requirements
from zonal.nn.convolution import ShortConvolution
from zonal.nn.gates import DecayGate, KeyGate, MassGate, fastest_decay
from zonal.nn.initialise import Draws
from zonal.nn.koopman import CGLift
from zonal.nn.memory import LayerMemory, Past
from zonal.nn.mixer import Inputs, TokenMixer, real
from zonal.nn.norm import RMSNorm
from zonal.nn.positions import check_masks, document_positions
from zonal.nn.rotary import Rotary
from zonal.nn.topology import Earlier, deaths
from zonal.stretch import active
from zonal.typed import check_switch, check_tensors

_ALONE = Inputs()
ReadoutNorm = Literal["auto", "head", "concat"]


class Attention(TokenMixer):
    """An attention layer with any operator.

    y = W_O · norm(A(W_Q c, W_K c, W_V c)), where A is the operator and c is x or its short convolution.

    Args:
        dim: size of x and y.
        heads: number of query heads H.
        operator: an Operator, or a spec such as "sko" or "ska(power=1)". The layer keeps its own copy, with one row
            of parameters per head. With rewa(shared_witness=True) and rewa_categorical, queries and keys share one
            projection.
        kv_heads: number of key and value heads, a divisor of ``heads``. None: ``heads``.
        head_dim: size of the values per head, and of queries and keys unless ``qk_dim`` is given. None: dim / heads.
        qk_dim: size of queries and keys per head. None: the size that the operator declares, or ``head_dim``.
        rotary: rotary positions on queries and keys. Several layers may share one ``Rotary``.
        qk_norm: RMSNorm on queries and on keys, per head, with one gain of size qk_dim each.
        readout_norm: RMSNorm on the output of the operator: "head" for each head, with one gain for all heads; "concat"
            over all heads together; None for no norm; "auto" for what the operator declares.
        readout_eps: ε of ``readout_norm``.
        conv: width in tokens of the short convolution of x before the projections. 0: no convolution.
        cg_lift: size of queries and keys after a ``CGLift``, which follows norms and rotary positions. None: no lift.
        key_gate: learn a gate in [0, 1] per token and key head that says how strongly a key is stored. Only for ridge
            and Koopman read-outs of the plain product.
        init: how the projections start (see ``reset_parameters``). "auto": what the operator declares.
        bias: use biases in the four projections.
        causal: each token sees itself and earlier tokens, or only earlier tokens if the operator excludes the token
            itself. False: each token sees all tokens. With a context, each token sees all tokens of the context.
        context_dim: size of the tokens of a context, for a layer of cross-attention: ``layer(x, context=c)``, with keys
            and values of c. Such a layer needs a context at each call. None: keys and values of x, or of a context of
            size ``dim`` where a call has one.
        dropout: in training, the share of weights that are set to zero (see ``zonal.attention``). Calls then run on
            path "dense", whose time and memory are quadratic in the number of tokens; other paths never hold weights.

    Raises:
        ArgumentError: sizes do not fit, the operator cannot run in a layer, or its name is unknown; the message lists
            the valid names.
    """

    merges = True
    splits = True

    def __init__(
        self,
        dim: int,
        heads: int,
        operator: Operator | str,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_dim: int | None = None,
        rotary: bool | Rotary = False,
        qk_norm: bool = False,
        readout_norm: ReadoutNorm | None = "auto",
        readout_eps: float = 1e-6,
        conv: int = 0,
        cg_lift: int | None = None,
        key_gate: bool = False,
        init: LayerInit | Literal["auto"] = "auto",
        bias: bool = False,
        causal: bool = True,
        context_dim: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        kv_heads, head_dim = requirements.sizes_of_heads("nn.Attention", dim, heads, kv_heads, head_dim)
        requirements.check_settings(readout_norm, conv, context_dim, init, dropout)
        for name, given in (("qk_norm", qk_norm), ("key_gate", key_gate), ("bias", bias), ("causal", causal)):
            check_switch("nn.Attention", name, given)
        if not isinstance(rotary, Rotary):
            check_switch("nn.Attention", "rotary (where it is no Rotary, which has a base)", rotary)
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, head_dim
        self.context_dim, self.causal, self.dropout = context_dim, causal and context_dim is None, dropout
        resolved = operator_of("nn.Attention", operator)
        if qk_dim is None:
            qk_dim = resolved.qk_dim if resolved.qk_dim is not None else head_dim
        require_whole("nn.Attention: qk_dim", qk_dim)
        self.qk_dim = qk_dim
        self.lift = None if cg_lift is None else CGLift(qk_dim, cg_lift)
        self.neighbours = resolved.score.deaths
        self.key_dim = (qk_dim if cg_lift is None else cg_lift) + self.neighbours
        self.operator: Operator = resolved.for_heads(heads, kv_heads, dim=self.key_dim)
        # a part that was sized here starts as the layer's, and so does what it draws
        self._starts = self.operator.sized_since(resolved)
        self.operator.score.check_values(head_dim)
        self.init: LayerInit = self.operator.layer_init if init == "auto" else init
        keyed = dim if context_dim is None else context_dim  # the size of what keys and values are made from
        requirements.check_start(self.init, qk_dim, head_dim, dim=dim, context_dim=keyed)
        self.readout_norm: str | None = self.operator.readout if readout_norm == "auto" else readout_norm

        requirements.check_operator(
            self.operator, heads, kv_heads, causal=self.causal, key_gate=key_gate, context=context_dim is not None
        )
        one_map = self.operator.score.one_map
        self.query = nn.Linear(dim, heads * qk_dim, bias=bias)
        if not one_map:
            self._modules["key"] = nn.Linear(keyed, kv_heads * qk_dim, bias=bias)
        self.value = nn.Linear(keyed, kv_heads * head_dim, bias=bias)
        self.output = nn.Linear(heads * head_dim, dim, bias=bias)
        if isinstance(rotary, Rotary) and rotary.head_dim != qk_dim:  # of layers whose queries have another size
            rotary = Rotary(qk_dim, rotary.base, rotary.scaling)
        self.rotary: Rotary | None = rotary if isinstance(rotary, Rotary) else Rotary(qk_dim) if rotary else None
        self.convolution = ShortConvolution(dim, conv) if conv else None
        self.decay_gate = self._decay_gate()
        anchor = self.operator.anchor
        learns = isinstance(anchor, PlanAnchor) and anchor.learn
        self.query_mass = MassGate(dim, heads) if learns else None
        self.key_mass = MassGate(keyed, kv_heads) if learns else None
        self.key_gate = KeyGate(keyed, kv_heads) if key_gate else None
        self.query_norm = RMSNorm(qk_dim) if qk_norm else None
        if qk_norm and not one_map:
            self._modules["key_norm"] = RMSNorm(qk_dim)
        size = {"head": head_dim, "concat": heads * head_dim, None: None}[self.readout_norm]
        self.readout = None if size is None else RMSNorm(size, readout_eps)
        if context_dim is not None:
            self._check_context()
        self.reset_parameters(Draws())

    def _decay_gate(self) -> DecayGate | None:
        """The gate for an operator whose decay the layer computes, or None."""
        declared = next((p for p in self.operator.prior if isinstance(p, Decay) and p.gated), None)
        if declared is None:
            return None
        rates = declared.log_decay({}, self.kv_heads).exp()
        return DecayGate(self.dim, rates, fastest_decay(self.key_dim) if self.operator.anchor.solves else None)

    @property
    def key(self) -> nn.Linear:
        """The projection to keys: that to queries where the operator has one map for both."""
        # a second registration would be a second copy to files, adapters and exported programs
        return self._modules.get("key", self.query)  # type: ignore[return-value]

    @property
    def key_norm(self) -> RMSNorm | None:
        """The norm of keys, or None: that of queries where the operator has one map for both."""
        return self._modules.get("key_norm", self.query_norm)  # type: ignore[return-value]

    @property
    def chooses(self) -> bool:
        return weighs_keys(self.operator)

    def reset_parameters(self, draws: Draws) -> None:
        """Draw all weights. A score whose size depends on the layer is initialised here, too; other learned parameters
        of the operator keep their declared values.

        With ``init="orthogonal"`` the projections to queries, keys and values start orthogonal, per head, and the
        output projection starts at zero, so the layer adds nothing to a residual stream at first. With "zero_output"
        only the output projection is zero, and the others are drawn as usual.
        """
        self._reset_projections(draws)
        for name in ("decay_gate", "key_gate", "query_mass", "key_mass", "convolution"):
            if (part := getattr(self, name)) is not None:
                part.reset_parameters(draws.child(name))
        entry = self._entry(draws.std)
        if self.lift is not None:  # μ starts at the mean of |k_j|²
            self.lift.reset_parameters(draws.child("lift"), mean=2 * entry**2)
        for norm in (self.query_norm, self.key_norm, self.readout):
            if norm is not None:
                norm.reset_parameters()
        for slot in self._starts:
            self.operator.start(slot, entry if self.lift is None else 2 * entry**2, draws.whole(f"operator.{slot}"))

    def _reset_projections(self, draws: Draws) -> None:
        one_map = self.key is self.query  # drawn once, by the name that other operators' queries have
        draws.linear_(self.query, "query")
        if not one_map:
            draws.linear_(self.key, "key")
        draws.linear_(self.value, "value")
        draws.linear_(self.output, "output", output=True)
        if self.init != "default":
            draws.orthogonal_(self.query.weight, "query.weight", self.heads)
            if not one_map:
                draws.orthogonal_(self.key.weight, "key.weight", self.kv_heads)
            nn.init.zeros_(self.output.weight)
        if self.init == "orthogonal":
            draws.orthogonal_(self.value.weight, "value.weight", self.kv_heads)

    def _entry(self, std: float) -> float:
        """The size of one number of queries and keys at the start, before a lift, for tokens whose numbers are of size
        one. std: of the weights.
        """
        if self.key_norm is not None:
            return 1.0
        size = std * self.key.in_features**0.5 if self.init == "default" else 1.0
        # weights of a convolution are drawn from U(-1/sqrt(w), 1/sqrt(w))
        return size if self.convolution is None else size * 3**-0.5

    def _empty(self, batch: int, dtype: torch.dtype, device: torch.device) -> LayerMemory:
        self._check_alone()
        memory = Memory.empty(self.operator, batch, self.kv_heads, self.key_dim, self.head_dim, dtype, device)
        return LayerMemory(
            memory, None if self.convolution is None else self.convolution.empty_tail(batch, dtype, device)
        )

    def learned(self) -> dict[str, Any]:
        """The learned quantities of the operator, as plain lists."""
        return self.operator.learned()

    def _mix(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, Past | None]:
        mass, score, key_bias = inputs.mass, self.operator.score, None
        if mass is not None:
            placed = any(x is not None for x in (self.rotary, self.convolution, inputs.cu_seqlens))
            requirements.check_mass(
                self.operator, x, mass, inputs.key_padding_mask, ordered=self.causal or inputs.before is not None,
                placed=placed or self.neighbours > 0,
            )  # fmt: skip
            there = mass > 0
            x, inputs = real(x, there), inputs._replace(key_padding_mask=there)
            # a plan's reference is mu nu^T K: its masses count tokens
            if not isinstance(self.operator.anchor, PlanAnchor):
                key_bias = mass.masked_fill(~there, 1).log()[:, None].expand(-1, self.kv_heads, -1)
        q, k, v, inner, tail = self._projected(x, inputs)
        if score.transports:
            v = score.carried(v, k)
        tokens = mass if mass is not None else inputs.key_padding_mask
        query_mass = self._mass(self.query_mass, self.heads, inner, tokens, inputs.cu_seqlens)
        key_mass = self._mass(self.key_mass, self.kv_heads, inner, tokens, inputs.cu_seqlens)
        y, absorbed = self._attend(
            q, k, v, inputs, log_decay=None if self.decay_gate is None else self.decay_gate(inner), key_bias=key_bias,
            key_gate=None if self.key_gate is None else self.key_gate(inner), query_mass=query_mass, key_mass=key_mass,
        )  # fmt: skip
        if mass is not None and isinstance(self.operator.anchor, Count):  # which has divided by the number of buckets
            y = y * ((mass > 0).sum(1) / mass.sum(1).clamp_min(torch.finfo(mass.dtype).tiny)).to(y)[:, None, None, None]
        y = score.carried(y, q, back=True) if score.transports else y
        return self._read_out(y), inputs.after(absorbed, tail, x.shape[1])

    # --- cross-attention --------------------------------------------------------------------------------------------

    def context_memory(self, context: Tensor, *, key_padding_mask: Tensor | None = None) -> Memory:
        """The memory of a context, for many calls ``layer(x, context=memory)``: its keys and values are made once. It
        has a constant size for operators that have such a memory.

        Args:
            context: (B, S, context_dim).
            key_padding_mask: bool (B, S), True for a real token.

        Raises:
            ArgumentError: shapes do not fit, or the layer cannot read a context; the operators of plans read queries
                and keys together, and have no memory.
        """
        k, v, inner = self._of_context(context, key_padding_mask)
        batch, heads, _, _ = k.shape
        empty = Memory.empty(self.operator, batch, heads, self.key_dim, self.head_dim, context.dtype, context.device)
        gate = None if self.key_gate is None else self.key_gate(inner)
        return empty.absorb(k, v, key_padding_mask, key_gate=gate)

    def _cross(
        self, x: Tensor, context: Tensor | Memory, context_padding_mask: Tensor | None, inputs: Inputs
    ) -> Tensor:
        q, score = self._lifted(self._queries(x)), self.operator.score
        if isinstance(context, Memory):
            self._check_context_memory(context, x, context_padding_mask, inputs.path)
            y = context.read(q)
        else:
            k, v, inner = self._of_context(context, context_padding_mask, x.shape[0])
            y = attention(
                q, k, v, self.operator, key_padding_mask=context_padding_mask, path=inputs.path,
                key_gate=None if self.key_gate is None else self.key_gate(inner),
                query_mass=self._mass(self.query_mass, self.heads, x, inputs.key_padding_mask),
                key_mass=self._mass(self.key_mass, self.kv_heads, inner, context_padding_mask),
                dropout=self.dropout if self.training else 0.0,
            )  # fmt: skip
        return self._read_out(score.carried(y, q, back=True) if score.transports else y)

    def _of_context(
        self, context: Tensor, key_padding_mask: Tensor | None, batch: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values by head, and the context with zeros for padding. batch: that of x, None = any."""
        self._check_context()
        check_tensors("nn.Attention", {"the context (where it is no memory of context_memory())": context})
        shape, size = tuple(context.shape), self.value.in_features
        if len(shape) != 3 or shape[2] != size or not shape[1] or batch not in (None, shape[0]):
            raise self._refused(
                f"the context must be ({'batch' if batch is None else batch}, tokens >= 1, {size}), received {shape}."
                f"{'' if size == shape[-1] or self.context_dim else ' Make the layer with context_dim for others.'}"
            )
        if key_padding_mask is not None:
            check_masks("nn.Attention: context", shape[0], shape[1], key_padding_mask, None)
            context = real(context, key_padding_mask)
        k, v = self._lifted(self._keys(context)), self._split(self.value(context), self.kv_heads)
        return k, self.operator.score.carried(v, k) if self.operator.score.transports else v, context

    def _check_context(self) -> None:
        """Raise ArgumentError for a layer that cannot read a context."""
        reason = requirements.context_refusal(
            self.operator, rotary=self.rotary is not None, conv=self.convolution is not None,
            same_size=self.context_dim in (None, self.dim),
        )  # fmt: skip
        if reason is not None:
            raise self._refused(reason)

    def _check_context_memory(self, memory: Memory, x: Tensor, mask: Tensor | None, path: str) -> None:
        if memory.operator is not in_use(self.operator) or memory.form.batch != x.shape[0]:
            raise self._refused(
                f"a context's memory must come from this layer's context_memory(), for {x.shape[0]} sequences; "
                f"received one of {memory.form.batch} sequences and operator {memory.operator.name!r}."
            )
        if mask is not None or path != "auto":
            raise self._refused(
                "a context's memory is read in one way, and holds its mask. Pass context_padding_mask to "
                "context_memory(), and leave path out."
            )
        if self.dropout and self.training:
            raise self._refused(
                "reading a context's memory sets no weights to zero, and the layer trains with "
                f"dropout={self.dropout}. Pass the context itself, or call eval() first."
            )

    def _check_alone(self) -> None:
        """Raise ArgumentError in a layer whose keys and values are a context's."""
        if self.context_dim is not None:
            raise self._refused(
                f"the layer was made with context_dim={self.context_dim}: it reads a context, and keeps no memory of "
                "x. Call layer(x, context=c), or layer(x, context=layer.context_memory(c))."
            )

    @torch.no_grad()
    def _report(self, x: Tensor, inputs: Inputs, report: Criterion) -> Reading:
        if inputs.before is None:
            raise self._refused("report judges queries by a memory. Pass memory, or return_memory=True.")
        return inputs.before.memory.read(self._projected(x, inputs)[0], report=report)

    def _projected(self, x: Tensor, inputs: Inputs = _ALONE) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values by head, what they were made from, and the convolution's tail."""
        self._check_alone()
        tail = None
        inner = x
        if self.convolution is not None:
            inner, tail = self.convolution(
                x, inputs.tail, key_padding_mask=inputs.key_padding_mask, cu_seqlens=inputs.cu_seqlens
            )
        q, k, v = self._queries(inner), self._keys(inner), self._split(self.value(inner), self.kv_heads)
        if self.rotary is not None:
            positions = self._positions(x, inputs)
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        q, k = self._lifted(q), self._lifted(k)
        if self.neighbours:
            q, k = self._with_deaths(q, k, inputs)
        return q, k, v, inner, tail

    def _queries(self, inner: Tensor) -> Tensor:
        q = self._split(self.query(inner), self.heads)
        return q if self.query_norm is None else self.query_norm(q)

    def _keys(self, inner: Tensor) -> Tensor:
        k = self._split(self.key(inner), self.kv_heads)
        return k if self.key_norm is None else self.key_norm(k)

    def _lifted(self, x: Tensor) -> Tensor:
        return x if self.lift is None else self.lift(x)

    def _mass(
        self,
        gate: MassGate | None,
        heads: int,
        inner: Tensor,
        tokens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | None:
        """The masses of queries or keys in a plan, (B, heads, T), None if all are equal. tokens (B, T): how many each
        stands for, or whether it is one; 0 gives and receives nothing.
        """
        mass = None if gate is None else gate(inner, None if tokens is None else tokens > 0, cu_seqlens)
        if tokens is None or not isinstance(self.operator.anchor, PlanAnchor):
            return mass
        count = tokens[:, None].expand(-1, heads, -1)
        count = count if count.is_floating_point() else count.to(inner.dtype)
        return count if mass is None else count * mass

    def _with_deaths(self, q: Tensor, k: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Queries and keys with the deaths of their neighbourhoods behind them; earlier keys are in the memory."""
        earlier = None
        if inputs.before is not None:
            past = inputs.before.memory
            assert isinstance(past, KeyValues)  # of a distance, which is no dot product
            earlier = Earlier(past.tokens.k[..., : k.shape[-1]], past.tokens.mask)
        mask, cu_seqlens = inputs.key_padding_mask, inputs.cu_seqlens
        found = deaths(q, k, self.neighbours, earlier=earlier, key_padding_mask=mask, cu_seqlens=cu_seqlens)
        return torch.cat([q, found[0]], -1), torch.cat([k, found[1]], -1)

    def stored_keys(
        self, x: Tensor, *, key_padding_mask: Tensor | None = None, action_mask: Tensor | None = None
    ) -> Tensor:
        """The keys of x (B, T, dim) as the memory of the operator stores them, (B, Hkv, T, r): prepared by the score,
        multiplied by their gate, and zero for tokens that are not stored.
        """
        x = x if key_padding_mask is None else real(x, key_padding_mask)
        _, k, v, inner, _ = self._projected(x, Inputs(key_padding_mask=key_padding_mask))
        k = self.operator.score.prepare_key(k, self.operator.bind(self.heads, self.kv_heads).score_params)
        k, _ = weighed(k, v, action_mask, None if self.key_gate is None else self.key_gate(inner))
        return k if key_padding_mask is None else k.masked_fill(~key_padding_mask[:, None, :, None], 0)

    def evidence(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The log kernel log K (B, H, T, S) of x (B, T, dim) and a context (B, S, context_dim; None: x itself) in
        float64, prior included, without gradients.

        It is -inf for pairs that are forbidden, that ``TopK`` leaves out, or whose kernel is 0.

        Raises:
            ArgumentError: the kernel of the operator may be negative.
        """
        return self.evidence_of(self.called(x, context))

    def evidence_of(self, call: Call) -> Tensor:
        """``evidence``, of the call that ``called`` has made."""
        if not self.operator.tags.positive:
            raise ArgumentError(
                f"nn.Attention.evidence: the kernel of operator {self.operator.name!r} may be negative, and has "
                "no logarithm. Its link would have to be a positive one."
            )
        with torch.no_grad():
            block, visible = definition.evidence(
                call.bound, call.coefficients, call.q, call.expand(call.k), call.visibility, call.bias
            )
            block = block if call.tags.log_space else block.log().masked_fill(~visible, float("-inf"))
            anchor = call.bound.anchor
            return block.masked_fill(block < anchor.least(block), float("-inf")) if isinstance(anchor, TopK) else block

    def weights(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The weights W (B, H, T, S) of x (B, T, dim) and a context (B, S, context_dim; None: x itself) in float64,
        without gradients, from the definition of the anchor.

        The output of the operator, before norm and output projection, is W times the values. Values of a key head are
        repeated for its query heads, and transformed if the score transforms values.
        """
        with torch.no_grad():
            return dense.dense(self.called(x, context))

    @torch.no_grad()
    def called(self, x: Tensor, context: Tensor | None = None) -> Call:
        """The call of the operator on x (B, T, dim) and a context (None: x itself) in float64, with the gates and
        masses of the layer, and with the unit vectors of R^S as values.
        """
        if active() is not None:
            raise self._refused(
                "weights and evidence are of whole sequences, which sequence_parallel splits over ranks."
            )
        if context is None:
            q, k, _, inner, _ = self._projected(x)
            read, log_decay = inner, None if self.decay_gate is None else self.decay_gate(inner)
        else:
            (k, _, read), inner, log_decay = self._of_context(context, None, x.shape[0]), x, None
            q = self._lifted(self._queries(x))
        units = torch.eye(k.shape[2], dtype=torch.float64, device=x.device).expand(x.shape[0], self.kv_heads, -1, -1)
        masses = Masses(self._mass(self.query_mass, self.heads, inner), self._mass(self.key_mass, self.kv_heads, read))
        call = prepare(
            self.operator, q.double(), k.double(), units, causal=self.causal and context is None, log_decay=log_decay,
            masses=masses,
        )  # fmt: skip
        return weighted(call, None, None if self.key_gate is None else self.key_gate(read))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """(B, T, heads · d) -> (B, heads, T, d)."""
        return x.unflatten(2, (heads, -1)).transpose(1, 2)

    def _positions(self, x: Tensor, inputs: Inputs) -> Tensor | int:
        """Positions count real tokens only, so that padding shifts nothing."""
        stretch = active()
        if stretch is not None:
            return stretch.positions(x, inputs.key_padding_mask, inputs.cu_seqlens)
        start = 0 if inputs.before is None else inputs.before.position
        if inputs.cu_seqlens is not None:
            return document_positions(inputs.cu_seqlens, x.shape[1])
        if inputs.key_padding_mask is not None:
            within = inputs.key_padding_mask.cumsum(dim=1) - 1
            return within.clamp(min=0) + (start[:, None] if isinstance(start, Tensor) else start)
        if isinstance(start, Tensor):
            return start[:, None] + torch.arange(x.shape[1], device=start.device)
        return start

    def _read_out(self, y: Tensor) -> Tensor:
        """(B, H, T, P) -> (B, T, dim)."""
        y = y.transpose(1, 2)
        if self.readout is None:
            return self.output(y.flatten(2))
        by_head = self.readout_norm == "head"
        return self.output(self.readout(y).flatten(2) if by_head else self.readout(y.flatten(2)))

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, "
            f"qk_dim={self.qk_dim}, readout_norm={self.readout_norm}"
        )
