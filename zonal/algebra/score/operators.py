"""Scores of tokens that are operators: distances and paths of matrices, and morphisms between frames."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zonal.algebra.declaration import Derived, Move, require, require_positive, require_whole
from zonal.algebra.score.base import Params, Score, low_rank


def _for_queries(value: Tensor, heads: int) -> Tensor:
    """Rows of key heads (Hkv, …) for query heads (H, …); one row is the same for all."""
    return value.repeat_interleave(heads // value.shape[0], 0) if value.shape[0] > 1 else value


def _orthogonal(seed: int | None, *shape: int) -> Tensor:
    """Orthogonal matrices (…, m, m) for a shape (…, m), float32, uniform."""
    generator = torch.Generator().manual_seed(seed or 0)
    q, r = torch.linalg.qr(torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64))
    return (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).float()


@dataclass(frozen=True)
class OperatorPath(Score):
    """S_ts = -|A_t - B_s|^2 / temperature for m x m matrices A, B in the Hilbert-Schmidt norm, or a path of relations.

    Along learned relations R_1 … R_n (m x m, initially orthogonal), S_ts = <A_t R_1 … R_n, B_s> / (m temperature).

    With the link exp and rows of sum one, both are softmax attention. The distance is 2 <A, B> minus |B|^2, which is a
    key bias, minus |A|^2, which is constant per row. The path is <q', k> with q' = A R_1 … R_n, a linear map of the
    query that a layer's projection can represent.

    With ``choices`` c, each query chooses its path: S_ts = <A_t R_1(A_t) … R_n(A_t), B_s> / (m temperature), with
    R_i(A) = p_i0 I + sum_j p_ij R_j and p_i = softmax_j <G_ij, A>. The c relations R_j are shared by all steps, and I
    allows paths shorter than n. No linear map of the query can represent this. All forms run as dot products of
    prepared vectors.

    A vector holds the matrix row by row, D = m^2. With ``rank`` r it holds the factors U (m x r), s (r), V (m x r) of A
    = U diag(s) V^T, D = r (2m + 1).
    size: m, None = from D. relations: n. choices: c, None = every query takes R_1 … R_n. temperature: None = 2m for the
    distance, which makes it q.k / sqrt(D) and biases, and 1 for a path. heads: number of key heads with their own
    relations R and gates G. seed: of their initial values (``Features``). shared_witness: a layer makes queries with
    the projection of keys.

    Raises: ArgumentError for vectors whose size fits no such matrix. Source: REWA (004).
    """

    bilinear = True
    kv_rows = ("relation", "gate")

    size: int | None = None
    relations: int = 0
    rank: int | None = None
    temperature: float | None = None
    heads: int = 1
    seed: int | None = None
    shared_witness: bool = False
    choices: int | None = None

    def indefinite_reason(self) -> str:
        return "score OperatorPath among keys need not be symmetric"

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("rank", 1), ("relations", 0), ("heads", 1), ("choices", 1)):
            if (value := getattr(self, name)) is not None:
                require_whole(f"OperatorPath: {name}", value, least)
        require(
            self.choices is None or self.relations > 0,
            f"OperatorPath: choices={self.choices} needs relations >= 1, the steps of a path, received "
            f"relations={self.relations}.",
        )
        require_positive("OperatorPath: temperature", self.temperature, optional=True)

    @property
    def one_map(self) -> bool:
        return self.shared_witness

    @property
    def keeps_keys(self) -> bool:
        return self.relations > 0 and self.rank is None

    def matrix_size(self, dim: int) -> int:
        """m for vectors of ``dim`` numbers. Raises: ArgumentError when there is none."""
        size = math.isqrt(dim) if self.rank is None else (dim // self.rank - 1) // 2
        whole = size >= 1 and dim == (size**2 if self.rank is None else self.rank * (2 * size + 1))
        form = "m^2" if self.rank is None else f"{self.rank} (2m + 1)"
        asked = "" if self.size is None else f" with m = {self.size}"
        require(
            whole and self.size in (None, size),
            f"score.OperatorPath: vectors of {form} numbers{asked} are required, received {dim}. "
            "In a layer, set qk_dim.",
        )
        return size

    def sized(self, dim: int, heads: int) -> "OperatorPath":
        size = self.matrix_size(dim)
        return replace(self, size=size, heads=heads) if self.relations and self.size is None else self

    def width(self, dim: int) -> int:
        return self.matrix_size(dim) ** 2 + (0 if self.relations else 2)

    def initial(self) -> dict[str, Tensor]:
        return self._start(self.size, self.seed) if self.relations and self.size is not None else {}

    def started(self, entry: float, seed: int) -> dict[str, Tensor]:
        return self._start(self.size, seed) if self.relations and self.size is not None and self.seed is None else {}

    def _start(self, size: int, seed: int | None) -> Params:
        """Relations (heads, n or c, m, m) and gates (heads, n, c + 1, m, m).

        Logits of the gates have unit standard deviation for queries of N(0, 1).
        """
        relation = _orthogonal(seed, self.heads, self.choices or self.relations, size)
        if self.choices is None:
            return {"relation": relation}
        generator = torch.Generator().manual_seed((seed or 0) + 1)
        gate = torch.randn(
            self.heads, self.relations, self.choices + 1, size, size, generator=generator, dtype=torch.float32
        )
        return {"relation": relation, "gate": gate / size}

    def _matrices(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, m, m)."""
        size = self.matrix_size(x.shape[-1])
        if self.rank is None:
            return x.unflatten(-1, (size, size))
        u, s, v = x.split([size * self.rank, self.rank, size * self.rank], -1)
        return (u.unflatten(-1, (size, self.rank)) * s.unsqueeze(-2)) @ v.unflatten(-1, (size, self.rank)).mT

    def _asked(self, matrix: Tensor, params: Params, scale: float | None) -> Tensor:
        """Matrices (B, H, T, m, m) as prepared queries."""
        size = matrix.shape[-1]
        if not self.relations:
            factor = scale if scale is not None else 1 / (self.temperature or 2 * size)
            flat = matrix.flatten(-2)
            return factor * torch.cat(
                [2 * flat, -torch.ones_like(flat[..., :1]), -flat.square().sum(-1, keepdim=True)], -1
            )
        held = params if self.size is not None else self._start(size, self.seed)
        relation, *gate = (
            _for_queries(held[name].to(matrix), matrix.shape[1]) for name in self.kv_rows if name in held
        )
        steps = (
            self._chosen(matrix, relation, gate[0]) if gate else [relation[:, None, i] for i in range(self.relations)]
        )
        for step in steps:
            matrix = matrix @ step
        return matrix.flatten(-2) * (scale if scale is not None else 1 / (size * (self.temperature or 1.0)))

    def _chosen(self, matrix: Tensor, relation: Tensor, gate: Tensor) -> list[Tensor]:
        """R_i(A) (B, H, T, m, m) of each step, for queries A (B, H, T, m, m)."""
        share = torch.einsum("bhtxy,hnjxy->nbhtj", matrix, gate).softmax(-1)
        none = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        return [p[..., :1, None] * none + torch.einsum("bhtj,hjxy->bhtxy", p[..., 1:], relation) for p in share]

    def prepare_query(self, q: Tensor, params: Params, scale: float | None) -> Tensor:
        return self._asked(self._matrices(q), params, scale)

    def prepare_key(self, k: Tensor, params: Params) -> Tensor:
        flat = self._matrices(k).flatten(-2)
        if self.relations:
            return flat
        return torch.cat([flat, flat.square().sum(-1, keepdim=True), torch.ones_like(flat[..., :1])], -1)

    def as_query(self, k: Tensor, params: Params) -> Tensor:
        size = math.isqrt(k.shape[-1])
        return self._asked(k[..., : size**2].unflatten(-1, (size, size)), params, None)

    def moves(self) -> tuple[Move, ...]:
        if self.choices is not None:
            text = (
                f"evidence is the trace of a path between two operators, at each of whose {self.relations} steps the "
                f"query weighs {self.choices} learned relations and none"
            )
            return (self.move("restriction", "chosen path", text), low_rank("m^2 entries"))
        if self.relations:
            text = f"evidence is the trace of a path of {self.relations} learned relations between two operators"
            return (self.move("restriction", "path", text), low_rank("m^2 entries"))
        bias = Derived(
            "key bias",
            "hence it is a dot product of entries with a key bias: but for its size, the score of softmax attention",
        )
        text = "evidence falls with the squared Hilbert-Schmidt distance of two operators"
        return (self.move("restriction", "operators", text, bias), low_rank("m^2 + 2 numbers"))


@dataclass(frozen=True)
class Categorical(Score):
    """S_ts = tr(R^T A_ts) / temperature for the morphism A_ts = g_t^-1 g_s between tokens' orthogonal frames g.

    Tokens are objects with exactly one morphism A_ts between two of them. A_tt = I, A_ts A_su = A_tu and A_st = A_ts^-1
    hold for any parameters if one projection makes queries and keys, as a layer of this score does. g_x = (I - X)(I +
    X)^-1 for the skew-symmetric X whose entries above the diagonal, row by row, are the numbers of the vector over
    sqrt(m), padded with 0. This map has condition number 1, and gives no reflections and no half turns.

    tr(R^T g_t^T g_s) = <g_t R, g_s> is a dot product of m^2 entries, and runs as one.

    size: m; None = the smallest with m (m - 1) / 2 >= D. relation: learn R, m x m per key head, initially orthogonal.
    Without it R = I, and the score is m - |A_ts - I|^2 / 2, a nearness. transport: a layer carries values between
    tokens, y_t = sum_s W_ts A_ts v_s, in groups of m numbers of v (a call takes values as they are). heads: number of
    key heads with their own relation. seed: of its initial value (``Features``).

    Raises: ArgumentError for vectors with more numbers than X has. Source: REWA (004).
    """

    bilinear = True
    kv_rows = ("relation",)
    one_map = True

    size: int | None = None
    relation: bool = False
    temperature: float = 1.0
    transport: bool = False
    heads: int = 1
    seed: int | None = None

    def indefinite_reason(self) -> str | None:
        return "score Categorical among keys need not be symmetric" if self.relation else None

    def __post_init__(self) -> None:
        require_whole("Categorical: heads", self.heads)
        if self.size is not None:
            require_whole("Categorical: size", self.size, 2)
        require_positive("Categorical: temperature", self.temperature)

    @property
    def transports(self) -> bool:
        return self.transport

    @property
    def plain(self) -> bool:
        return not self.relation and self.temperature == 1

    def frame_size(self, dim: int) -> int:
        """m for vectors of ``dim`` numbers. Raises: ArgumentError when they do not fit."""
        least = (1 + math.isqrt(max(8 * dim - 7, 0))) // 2 + (dim > 0)
        size = self.size if self.size is not None else max(least, 2)
        most = size * (size - 1) // 2
        require(
            0 < dim <= most,
            f"score.Categorical: vectors of 1 to {most} numbers are required with m = {size}, received {dim}. "
            "In a layer, set qk_dim.",
        )
        return size

    def sized(self, dim: int, heads: int) -> "Categorical":
        return replace(self, size=self.frame_size(dim), heads=heads)

    def width(self, dim: int) -> int:
        return self.frame_size(dim) ** 2

    def initial(self) -> dict[str, Tensor]:
        return self._drawn(self.seed)

    def started(self, entry: float, seed: int) -> dict[str, Tensor]:
        return {} if self.seed is not None else self._drawn(seed)

    def _drawn(self, seed: int | None) -> dict[str, Tensor]:
        return {"relation": _orthogonal(seed, self.heads, self.size)} if self.relation and self.size is not None else {}

    def frames(self, x: Tensor) -> Tensor:
        """g (…, m, m) of vectors (…, D), in the type of x."""
        size = self.frame_size(x.shape[-1])
        row, column = torch.triu_indices(size, size, 1, device=x.device)[:, : x.shape[-1]]
        # in float64: a turn by nearly a half is ill-conditioned, and the frame would not be orthogonal
        upper = x.new_zeros(*x.shape[:-1], size, size, dtype=torch.float64)
        upper[..., row, column] = x.double() / size**0.5
        skew, one = upper - upper.mT, torch.eye(size, dtype=torch.float64, device=x.device)
        # without a check: what is not finite is to give what is not finite, for its token alone
        return torch.linalg.solve_ex(one + skew, one - skew, check_errors=False)[0].to(x.dtype)

    def check_values(self, dim: int) -> None:
        fits = not self.transport or (self.size is not None and dim % self.size == 0)
        require(
            fits,
            f"score.Categorical: transport needs values of a multiple of m = {self.size} numbers, received {dim}. "
            "Set size or head_dim.",
        )

    def carried(self, v: Tensor, x: Tensor, back: bool = False) -> Tensor:
        """Values v (B, H, T, P) in the common frame, g v for each m numbers, with frames g of x (B, H, T, D).

        back: out of the common frame, g^-1 v.
        """
        self.sized(x.shape[-1], 1).check_values(v.shape[-1])
        frame = self.frames(x)
        parts = v.unflatten(-1, (-1, frame.shape[-1])).mT
        return ((frame.mT if back else frame).to(v.dtype) @ parts).mT.flatten(-2)

    def _asked(self, frame: Tensor, params: Params, scale: float | None) -> Tensor:
        if self.relation:
            size = frame.shape[-1]
            relation = (params["relation"] if self.size is not None else _orthogonal(self.seed, self.heads, size)).to(
                frame
            )
            frame = frame @ relation.repeat_interleave(frame.shape[1] // relation.shape[0], 0)[:, None]
        return frame.flatten(-2) * (scale if scale is not None else 1 / self.temperature)

    def prepare_query(self, q: Tensor, params: Params, scale: float | None) -> Tensor:
        return self._asked(self.frames(q), params, scale)

    def prepare_key(self, k: Tensor, params: Params) -> Tensor:
        return self.frames(k).flatten(-2)

    def as_query(self, k: Tensor, params: Params) -> Tensor:
        size = math.isqrt(k.shape[-1])
        return self._asked(k.unflatten(-1, (size, size)), params, None)

    def moves(self) -> tuple[Move, ...]:
        compose = Derived(
            "turns compose", "hence turns compose: the one from t to u is the one from t to s and that from s to u"
        )
        text = "tokens are frames, and evidence is the trace of the turn from one to the other"
        return (self.move("restriction", "frames", text, compose), low_rank("m^2 entries"))


__all__ = ["Categorical", "OperatorPath"]
