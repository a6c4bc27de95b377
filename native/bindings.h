// Parts of the extension that have a file of their own.
#pragma once

#include <nanobind/nanobind.h>

namespace foredraft {

void bind_suffix(nanobind::module_& m);
void bind_ngram_table(nanobind::module_& m);

}  // namespace foredraft
