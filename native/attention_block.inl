// One group of 16 positions for the queries of a task: scores, weights, sums (include after one vector_*.h and rows.inl).
//
// Keys lie dimension after dimension with their positions side by side, values position after position: so a score is a lane, a sum over
// values has its dimensions in lanes, and nothing is transposed or summed across lanes where much is read.
#include "kernel_table.h"

namespace {

using foredraft::kKeyBlock;
using foredraft::kMaxTaskQueries;

constexpr int kGroup = 16;  // positions
constexpr int kGroups = kKeyBlock / kGroup;
// As many sums as registers hold, of queries by groups and of queries by vectors.
constexpr int kScoreGroups = kVectorsPerPanel == 2 ? 2 : 1;
constexpr int kScoreQueries = kVectorsPerPanel == 2 ? 12 : 6;
constexpr int kValueGroups = kGroups;  // sums stay in registers for a whole block
constexpr int kValueQueries = kVectorsPerPanel == 2 ? 6 : 3;
constexpr int kValueVectors = kVectorsPerPanel == 2 ? 4 : 2;

inline int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }
inline int between(int64_t x, int lowest, int highest) {
  return x < lowest ? lowest : x > highest ? highest : static_cast<int>(x);
}

// A score s, in units of ln 2, weighs 2^(s - origin). The origin is 0 as long as the highest score lies within kReach of it, where no
// weight that counts is too large or too small for a float; else the highest score becomes the origin.
constexpr float kReach = 56.0f;
constexpr float kUnits = 1.44269504088896341f;  // a score of e's exponent in these units

// A partial result of one query: padded(dim) sums, the total weight in 16 lanes, the origin, and the floor that a score has to reach for
// the origin to hold: none once one has.
inline int64_t partial_size(int64_t dim) { return padded(dim) + 32; }
struct Partial {
  float* sums;
  int64_t width;  // padded dim
  float* totals() const { return sums + width; }
  float& origin() const { return sums[width + 16]; }
  float& floor() const { return sums[width + 17]; }
  bool empty() const { return floor() != -__builtin_inff(); }
};

// Room for the partial results of a query that wait to be merged; of n spans these are no more than 2 log2(n) + 3.
int64_t partial_floats(int64_t dim, int64_t spans) {
  int64_t count = 3;
  for (; spans > 1; spans /= 2) count += 2;
  return count * partial_size(dim);
}

// Queries of all tiles, where a head's last tile may have fewer than others.
constexpr int kTileRoom = kMaxTaskQueries * 4 / 3;

int64_t attention_scratch(int64_t dim, int64_t spans) {
  return kGroup * padded(dim) + kMaxTaskQueries * (kKeyBlock + partial_floats(dim, spans)) + kTileRoom * padded(dim);
}

// The keys or the values of a group and head, in pieces of 16 elements; see Ahead.
struct Fetch {
  const char* memory;
  int64_t step;  // bytes from piece to piece
};
// Into the second-level cache: on Zen 4, with the first as their aim, reading and computing did not overlap (LOG.md).
inline void fetch(const char* memory) { __builtin_prefetch(memory, 0, 2); }
// The same for loops over few queries, which ask faster than memory answers: a processor drops what it has no room for, so what was asked
// for a while ago is asked for again.
constexpr int kFewQueries = 6;
constexpr int64_t kAgainBytes = 8192;
template <int Q>
inline void fetch_for(const char* memory) {
  fetch(memory);
  if (Q <= kFewQueries) fetch(memory - kAgainBytes);
}

// How the tiles of a head's queries share in fetching: each loops over as many units as the others, and all together fetch that many,
// evenly and in order. Divisions are slow beside what they would save.
class Sharing {
 public:
  explicit Sharing(int tiles) : tiles_(tiles), inverse_((kOne + tiles - 1) / tiles) {}

  int tiles() const { return tiles_; }
  // What the loop number `loop`, counted over all tiles, fetches of `units` of so many pieces.
  Fetch of(const Fetch* units, int loop, int64_t pieces) const {
    if (tiles_ == 1) return units[loop];
    const int64_t number = loop * inverse_ / kOne, part = loop - number * tiles_;
    const Fetch& unit = units[number];
    return {unit.memory + unit.step * pieces * part * inverse_ / kOne, (unit.step * inverse_ + kOne - 1) / kOne};
  }

 private:
  static constexpr int64_t kOne = 1 << 16;
  int tiles_;
  int64_t inverse_;
};

// The state of the queries of one task; query = head in task * queries per head + query in head.
struct QueryTile {
  Sharing scoring, adding;  // the tiles of scores, and of values
  float* queries;  // [head][tile][padded dim][queries of a tile], scaled: those of a tile lie side by side
  float* scores;   // [query][kKeyBlock]
  float* sums;     // [query][partial], of the span at hand
  float* keys;     // [dim][kGroup], only where pages don't hold whole groups
  // The positions of the block at hand that a query sees are begin .. end - 1, those from `straight` at slots of their own; the same for
  // each head.
  int begin[kMaxTaskQueries], end[kMaxTaskQueries], straight[kMaxTaskQueries];
  bool fresh;                  // the sums of the span at hand are not even set
  bool whole;                  // every query sees the whole block, and every key of it at the slot of its position
  int64_t whole_begin;         // blocks from here to whole_end are whole
  int64_t whole_end;
  float soft_cap;              // 0: none
  int64_t dim, width, stride;  // width = padded dim, stride = floats of a partial
  int count, tile;             // queries of a head; of a tile

  QueryTile(Sharing score_tiles, Sharing value_tiles) : scoring(score_tiles), adding(value_tiles) {}

  const float* tile_of(int head, int number) const { return queries + (head * scoring.tiles() + number) * tile * width; }
  float* score(int head, int query) const { return scores + (head * count + query) * kKeyBlock; }
  Partial partial(int head, int query) const { return {sums + (head * count + query) * stride, width}; }
};

template <bool Bf16>
inline const void* element(const void* base, int64_t at) {
  return static_cast<const char*>(base) + at * (Bf16 ? 2 : 4);
}

template <bool Bf16>
inline Vec load_whole(const void* base, int64_t at) {
  if (Bf16) return load_bf16(static_cast<const uint16_t*>(base) + at);
  return load(static_cast<const float*>(base) + at);
}

template <bool Bf16>
inline Vec load_part(const void* base, int64_t at, int n) {
  if (n == 16) return load_whole<Bf16>(base, at);
  if (!Bf16) return load_first(static_cast<const float*>(base) + at, n);
  uint16_t row[16] = {};
  __builtin_memcpy(row, static_cast<const uint16_t*>(base) + at, static_cast<size_t>(n) * 2);
  return load_bf16(row);
}

inline float load_one(const CacheView& c, const void* base, int64_t at) {
  if (!c.bf16) return static_cast<const float*>(base)[at];
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(base)[at]) << 16;
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// Keys of one or more groups, at elements `at`, `step` elements from dimension to dimension. What is fetched meanwhile goes by itself: to
// copy a struct that was just written waits for those writes, and so for the sums that were stored before them.
struct KeyGroups {
  const void* keys;
  int64_t at[kScoreGroups], step;
};

// Scores of G groups for Q queries of a tile: one chain of fused multiply-adds over the dimensions for each query and lane. Not inlined,
// as add_vectors is not: inlined copies differ by what is around them, and by a tenth in speed.
template <int Q, int G, bool Bf16>
__attribute__((noinline, aligned(64))) void score_groups(const KeyGroups& k, const Fetch* fetches, const float* queries, int64_t tile,
                                                         int64_t dim, float* scores) {
  Vec sum[Q][G];
#pragma GCC unroll 16
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 2
    for (int g = 0; g < G; ++g) sum[q][g] = zero();
  const void* keys[G];
#pragma GCC unroll 2
  for (int g = 0; g < G; ++g) keys[g] = element<Bf16>(k.keys, k.at[g]);
  const int64_t key_step = k.step;
  int64_t key_at = 0;
  for (int part = 0; part < G; ++part) {
    const char* ahead = fetches[part].memory;  // one after the other: a stream
    const int64_t step = fetches[part].step;
    for (int64_t piece = 0; piece < dim; piece += G, key_at += key_step, queries += tile) {
      Vec key[G];
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) {
        fetch_for<Q>(ahead);
        ahead += step;
        key[g] = load_whole<Bf16>(keys[g], key_at);
      }
#pragma GCC unroll 16
      for (int q = 0; q < Q; ++q) {
        const Vec query = broadcast(queries[q]);
#pragma GCC unroll 2
        for (int g = 0; g < G; ++g) sum[q][g] = fma(key[g], query, sum[q][g]);
      }
    }
  }
#pragma GCC unroll 16
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 2
    for (int g = 0; g < G; ++g) store(scores + q * kKeyBlock + g * kGroup, sum[q][g]);
}

// The score of one key for up to 16 queries of a tile, by the same chain.
inline Vec score_one(const CacheView& c, int64_t at, const float* queries, int tile, int n) {
  Vec sum = zero();
  for (int64_t d = 0; d < c.dim; ++d) sum = fma(broadcast(load_one(c, c.keys, at + d * c.page_size)), load_first(queries + d * tile, n), sum);
  return sum;
}

inline float power_one(float x) {
  float lanes[16];
  store(lanes, power_lanes(broadcast(x < 127.0f ? x : 127.0f)));
  return lanes[0];
}

// What is in a partial result, relative to another origin.
inline void move_origin(const Partial& p, float origin) {
  const Vec factor = broadcast(power_one(p.origin() - origin));
  for (int64_t i = 0; i < p.width + 16; i += 16) store(p.sums + i, mul(load(p.sums + i), factor));
  p.origin() = origin;
}

// Vectors first .. last - 1 of a query's scores become weights; what is outside begin .. end - 1 weighs nothing where Cut.
template <bool Cut>
inline void weigh_scores(float* scores, int first, int last, int begin, int end, float soft_cap, const Partial& p) {
  const Vec nothing = broadcast(-__builtin_inff());
  Vec x[kGroups], highest = nothing;
#pragma GCC unroll 4
  for (int i = first; i < last; ++i) {
    x[i] = load(scores + 16 * i);
    if (Cut && soft_cap != 0.0f) x[i] = mul(cap_lanes(x[i], broadcast(soft_cap)), broadcast(kUnits));
    if (Cut) x[i] = blend_first(nothing, blend_first(x[i], nothing, between(end - 16 * i, 0, 16)), between(begin - 16 * i, 0, 16));
    highest = max(highest, x[i]);
  }
  const bool holds = !not_less_mask(highest, broadcast(p.origin() + kReach)) && not_less_mask(highest, broadcast(p.floor()));
  const float top = holds ? 0.0f : max_lanes(highest);
  const bool none = top == -__builtin_inff();
  if (__builtin_expect(!holds && !none, 0)) move_origin(p, top);
  const Vec origin = broadcast(p.origin());
  Vec total = load(p.totals());
#pragma GCC unroll 4
  for (int i = first; i < last; ++i) {
    const Vec weight = power_lanes(sub(x[i], origin));
    store(scores + 16 * i, weight);
    total = add(total, weight);
  }
  store(p.totals(), total);
  if (!none || any_nan(total)) p.floor() = -__builtin_inff();
}

// Scores of the block become weights. Plain: every query sees the whole block, and there is no soft cap.
template <bool Plain>
void weigh(const QueryTile& t, int head) {
  for (int q = 0; q < t.count; ++q) {
    if (Plain)
      weigh_scores<false>(t.score(head, q), 0, kGroups, 0, kKeyBlock, 0.0f, t.partial(head, q));
    else if (t.begin[q] < t.end[q])
      weigh_scores<true>(t.score(head, q), t.begin[q] / 16, (t.end[q] + 15) / 16, t.begin[q], t.end[q], t.soft_cap, t.partial(head, q));
  }
}

// Values of one or more groups, at elements at[] + offset, and the weights and sums of a head's first query.
struct ValueGroups {
  const void* values;
  const int64_t* at;
  int64_t offset, dim;
  const float* weights;
  float* sums;
  int64_t stride;
  int groups;
  bool fresh;  // the sums are nothing yet, and not even set
};

// The same number, of which the compiler knows nothing: it would keep twenty addresses in vector registers instead of adding up again.
template <class T>
inline T anew(T x) {
  asm("" : "+r"(x));
  return x;
}

// Adds values first .. last - 1 of each group to Q queries from `query` on, position by position: V vectors of `lanes` dimensions each,
// from dimension d.
template <int Q, int V, bool Bf16>
__attribute__((noinline, aligned(64))) void add_vectors(const ValueGroups& v, const Fetch* fetches, int query, int64_t d, int lanes,
                                                        int first, int last) {
  float* sums = v.sums + query * v.stride + d;
  Vec sum[Q][V];
  if (v.fresh) {
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) sum[q][i] = zero();
  } else {
    const float* from = sums;
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q, from = anew(from + v.stride))
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) sum[q][i] = load(from + 16 * i);
  }
  const void* const values = element<Bf16>(v.values, v.offset + d);
  const int64_t* at = v.at + first;
  const float* weights = v.weights + query * kKeyBlock + first;
  for (int groups = v.groups; groups > 0; --groups, ++fetches, at += kGroup, weights += kGroup) {
    const int64_t step = fetches->step;
    const char* ahead = fetches->memory + (d + first * V) * step;
    for (int j = 0; j < last - first; ++j) {
      const void* const from = element<Bf16>(values, at[j]);
      Vec value[V];
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) {
        fetch_for<Q>(ahead);
        ahead += step;
        value[i] = V == 1 ? load_part<Bf16>(from, 0, lanes) : load_whole<Bf16>(from, 16 * i);
      }
#pragma GCC unroll 8
      for (int q = 0; q < Q; ++q) {
        const Vec share = broadcast(weights[q * kKeyBlock + j]);
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) sum[q][i] = fma(value[i], share, sum[q][i]);
      }
    }
  }
  const int64_t stride = v.stride;
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q, sums = anew(sums + stride))
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) store(sums + 16 * i, sum[q][i]);
}

template <int Q, bool Bf16>
void add_values(const ValueGroups& v, const Fetch* fetches, int query, int first, int last) {
  int64_t d = 0;
  for (; d + 16 * kValueVectors <= v.dim; d += 16 * kValueVectors) add_vectors<Q, kValueVectors, Bf16>(v, fetches, query, d, 16, first, last);
  for (; d < v.dim; d += 16) add_vectors<Q, 1, Bf16>(v, fetches, query, d, between(v.dim - d, 0, 16), first, last);
}

template <int Q, bool Bf16>
struct Steps {
  template <int G, class... Arguments>
  static void scores(int n, const Arguments&... arguments) {
    n == Q ? score_groups<Q, G, Bf16>(arguments...) : Steps<Q - 1, Bf16>::template scores<G>(n, arguments...);
  }
  template <class... Arguments>
  static void values(int n, const Arguments&... arguments) {
    n == Q ? add_values<Q, Bf16>(arguments...) : Steps<Q - 1, Bf16>::values(n, arguments...);
  }
};
template <bool Bf16>
struct Steps<0, Bf16> {
  template <int G, class... Arguments>
  static void scores(int, const Arguments&...) {}
  template <class... Arguments>
  static void values(int, const Arguments&...) {}
};

}  // namespace
