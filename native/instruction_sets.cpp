#include "instruction_sets.h"

#include <stdexcept>

namespace foredraft {

namespace {

struct Entry {
  const KernelTable* table;
  bool (*runs_here)();
};

// Best first. A new instruction set is one more line, its vector_*.h and its isa_*.cpp. The features asked for are those that the file
// is compiled with (CMakeLists.txt); the compiler's builtins also check that the operating system saves the registers.
const Entry kEntries[] = {
#if defined(FOREDRAFT_X86)
    {&kAvx512,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
     }},
    {&kAvx2, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
    {&kPortable, [] { return true; }},
};

}  // namespace

std::vector<const KernelTable*> runnable_tables() {
  std::vector<const KernelTable*> tables;
  for (const Entry& entry : kEntries)
    if (entry.runs_here()) tables.push_back(entry.table);
  return tables;
}

const KernelTable& table_for(const std::string& name) {
  std::string valid;
  for (const KernelTable* table : runnable_tables()) {
    if (name.empty() || name == table->name) return *table;
    valid += (valid.empty() ? "" : ", ") + std::string(table->name);
  }
  throw std::invalid_argument("instruction set '" + name + "' does not run here; valid are " + valid);
}

}  // namespace foredraft
