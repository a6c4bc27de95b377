// The kernels for one instruction set. Compiled with its own flags, so it includes nothing whose inline code could be shared with
// other files: only intrinsics, fixed-width integers and libm's declarations.
#include "vector_avx2.h"

#include "linear.inl"
#include "rows.inl"
#include "attention_block.inl"
#include "attention.inl"
#include "vocabulary.inl"
#include "noise.inl"
#include "sampling.inl"

#define FOREDRAFT_TABLE kAvx2
#include "table.inl"
