// One entry of the dispatch table (include last; FOREDRAFT_TABLE names it).
namespace foredraft {

const KernelTable FOREDRAFT_TABLE = {
    kInstructionSet,
    kPanel,
    kMaxTileRows,
    linear,
    rms_norm,
    gate_multiply,
    soft_cap,
    rope_and_store,
    attention,
    merge_attention,
    attention_scratch,
    partial_floats,
    argmax_float,
    argmax_double,
    philox,
    sampling_scratch,
    law_float,
    law_double,
    draw_float,
    draw_double,
    read_memory,
};

}  // namespace foredraft
