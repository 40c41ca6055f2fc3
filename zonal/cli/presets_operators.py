"""Operators that the parts make possible and no paper has, beside those that they are made of: this project's own question."""

from zonal.cli.options import ModelOptions, TaskOptions, TrainingOptions
from zonal.cli.preset import Preset

_TASK = TaskOptions(task="mqar", vocab_size=64, length=32, pairs=8, train_examples=50_000, test_examples=1000)
_MODEL = ModelOptions(layers=2, dim=64, heads=2, mlp="none", conv=4)
_TRAINING = TrainingOptions(
    steps=500, batch_size=32, eval_every=50, eval_batch_size=250, stop_at_accuracy=0.995, tensorboard=False
)
_RANK = 4
_LIFTED = 6  # the most that a lift makes of _RANK numbers: three for each pair
_FEATURES = 14  # of a square on _RANK numbers
_COSINE = "score='cosine'"


def _regime(parts: str) -> str:
    """Mechanisms that leave the size of queries and keys to the model, at the size of the others."""
    return f"regime({parts}, rank={_RANK})"


PRESETS = {
    "new-operators": Preset(
        f"kernel ridge and Koopman read-outs with squared-affine, SKO and Yat kernels against their parents: 8 pairs recalled by heads of {_RANK} numbers",
        {
            "Softmax": f"regime(rank={_RANK})",
            "Squared affine": f"squared_affine(d_qk={_RANK})",
            "SKO": _regime(f"{_COSINE}, link='gegenbauer(degrees=(2.0,))', anchor='count'"),
            "Yat": _regime(f"{_COSINE}, link='yat(eps=0.1)'"),
            "Ridge": _regime("score='dot(scale=1.0, key_limit=1.0)', link='identity', anchor='ridge(learn_ridge=True)'"),
            "SKA K=0": f"ska(power=0, rank={_RANK})",
            "SKA K=1": f"ska(power=1, rank={_RANK})",
            f"SKA K=0, {_FEATURES} numbers": f"ska(power=0, rank={_FEATURES})",
            f"SKA K=1, {_FEATURES} numbers": f"ska(power=1, rank={_FEATURES})",
            "Squared-affine ridge": f"kernel_ridge(d_qk={_RANK})",
            "SKO ridge": f"kernel_ridge(kernel='sko', d_qk={_RANK})",
            "Yat ridge": f"kernel_ridge(kernel='yat(eps=0.1)', d_qk={_RANK})",
            "Squared-affine Koopman K=0": f"kernel_ridge(power=0, d_qk={_RANK})",
            "Squared-affine Koopman K=1": f"kernel_ridge(power=1, d_qk={_RANK})",
            "SKO Koopman K=1": f"kernel_ridge(kernel='sko', power=1, d_qk={_RANK})",
            "Yat Koopman K=1": f"kernel_ridge(kernel='yat(eps=0.1)', power=1, d_qk={_RANK})",
        },
        "2", "3e-3,1e-2", _TASK, _MODEL, _TRAINING,
    ),
    "lifted-keys": Preset(
        f"Koopman read-outs on CG-lifted keys: {_RANK} numbers of queries and keys lifted to {_LIFTED}, against {_RANK} and {_LIFTED} as they are",
        {
            f"SKA K={power}{words}": spec.format(f"ska(power={power}, rank={rank})")
            for power in (0, 1)
            for words, spec, rank in (("", "{}", _RANK), (f", lifted to {_LIFTED}", f"lifted(operator='{{}}', size={_LIFTED})", _RANK), (f", {_LIFTED} numbers", "{}", _LIFTED))
        },
        "2", "3e-3,1e-2", _TASK, _MODEL, _TRAINING,
    ),
}  # fmt: skip
