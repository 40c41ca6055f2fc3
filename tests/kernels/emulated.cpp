// Runs recorded calls of a kernel (emulated.py) and compares what they leave in memory with the record.
//
// A record is: the name of the function, structs, and regions of memory that the structs point to, each with its address
// there, what it held before the call, and after it. Words of a struct that are such an address get that of a copy.

#include <cstdio>
#include <string>
#include <vector>
#ifdef __AMX_TILE__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define X(name) {#name, reinterpret_cast<void*>(name)},
const struct { const char* name; void* function; } TABLE[] = {FUNCTIONS};

struct Region {
  uint64_t address;
  char kind;
  std::vector<char> now, after;
};

template <typename N>
N take(FILE* file) {
  N number;
  if (std::fread(&number, sizeof number, 1, file) != 1) std::exit(3);
  return number;
}

std::vector<char> bytes(FILE* file, uint64_t size) {
  std::vector<char> data(size);
  if (size > 0 && std::fread(data.data(), size, 1, file) != 1) std::exit(3);
  return data;
}

// the largest difference, over one more than the largest number
template <typename T, typename F>
double apart(const Region& region, const F& number) {
  double most = 0, size = 1;
  for (size_t i = 0; i < region.now.size() / sizeof(T); ++i) {
    T a, b;
    std::memcpy(&a, region.now.data() + i * sizeof(T), sizeof(T));
    std::memcpy(&b, region.after.data() + i * sizeof(T), sizeof(T));
    const double x = number(a), y = number(b);
    if (std::isfinite(y)) size = std::max(size, std::fabs(y));
    if (!(x == y || (x != x && y != y))) most = std::max(most, std::isfinite(x - y) ? std::fabs(x - y) : 1e9);
  }
  return most / size;
}

int main(int count, char** names) {
  int wrong = 0;
#ifdef __AMX_TILE__
  if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 4;  // Linux does not grant the tile registers
#endif
  for (int i = 1; i < count; ++i) {
    FILE* file = std::fopen(names[i], "rb");
    if (file == nullptr) return 3;
    const std::vector<char> name = bytes(file, take<uint64_t>(file));
    std::vector<std::vector<char>> structs(take<uint64_t>(file));
    for (auto& each : structs) each = bytes(file, take<uint64_t>(file));
    std::vector<Region> regions(take<uint64_t>(file));
    for (Region& region : regions) {
      region.address = take<uint64_t>(file);
      region.kind = take<char>(file);
      const uint64_t size = take<uint64_t>(file);
      region.now = bytes(file, size);
      region.after = bytes(file, size);
    }
    std::fclose(file);
    for (auto& each : structs)
      for (size_t at = 0; at + 8 <= each.size(); at += 8)
        for (Region& region : regions) {
          if (std::memcmp(each.data() + at, &region.address, 8) != 0) continue;
          const char* place = region.now.data();
          std::memcpy(each.data() + at, &place, 8);
          break;
        }
    int failed = -1;
    for (const auto& known : TABLE) {
      if (std::string(name.begin(), name.end()) != known.name) continue;
      if (structs.size() == 1) failed = reinterpret_cast<int (*)(const void*)>(known.function)(structs[0].data());
      else failed = reinterpret_cast<int (*)(const void*, const void*)>(known.function)(structs[0].data(), structs[1].data());
    }
    double most = failed != 0 ? 1e9 : 0;
    for (const Region& region : regions) {
      if (region.kind == 'f') most = std::max(most, apart<float>(region, [](float x) { return x; }));
      else if (region.kind == 'h') most = std::max(most, apart<uint16_t>(region, [](uint16_t x) { return number(x); }) / 100);
      else if (region.kind == 'd') most = std::max(most, apart<double>(region, [](double x) { return x; }));
      else if (region.kind == 'i' && region.now != region.after) most = 1e9;
    }
    std::printf("%s %.2g\n", std::string(name.begin(), name.end()).c_str(), most);
    wrong += !(most < 1e-4);
  }
  return wrong != 0;
}
