// Which instruction sets this machine can run.
#pragma once
#include <string>
#include <vector>

#include "kernel_table.h"

namespace foredraft {

// Those that this CPU and operating system run, best first; "portable" is always last.
std::vector<const KernelTable*> runnable_tables();
// The best, or the one called `name`; throws std::invalid_argument for a name that is unknown or cannot run here.
const KernelTable& table_for(const std::string& name);

}  // namespace foredraft
