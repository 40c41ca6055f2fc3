"""Instruction sets that only tests compile for: the code of wide vectors, on processors that have none.

ZONAL_TEST_SET=wide (or pairs, or tiles) runs any test with such kernels; surroundings.py puts the set in. They are not
optimised: a compiler takes a minute to fit tiles of thirty-two registers into sixteen.
"""

from zonal.kernels.build import SETS, InstructionSet

_AVX2 = next(isa for isa in SETS if isa.name == "avx2")
_LANES = ("-DZONAL_LANES=16", "-DZONAL_REGISTERS=32")
_WIDE = (*_AVX2.flags, "-O0", *_LANES)
_PAIRS = (*_WIDE, "-DZONAL_PAIRS=1")
TEST_SETS = {
    "wide": (InstructionSet("wide", "sixteen lanes", _WIDE, _AVX2.needs),),
    "pairs": (InstructionSet("pairs", "pairs", _PAIRS, _AVX2.needs, pairs=True), _AVX2),
    "tiles": (InstructionSet("tiles", "tiles", (*_PAIRS, "-DZONAL_TILES=1"), _AVX2.needs, pairs=True), _AVX2),
}
# AMX beside AVX2, for emulators of its tiles
AMX = InstructionSet(
    "amx", "AMX", (*_AVX2.flags, *_LANES, "-DZONAL_PAIRS=1", "-mamx-tile", "-mamx-bf16"), _AVX2.needs, pairs=True
)
