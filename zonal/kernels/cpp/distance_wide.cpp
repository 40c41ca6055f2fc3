// distance.cpp in vectors of sixteen, for processors with AVX-512: its differences take twice the operations of a product, in twice the registers.

#define ZONAL_LANES 16
#include "distance.cpp"
