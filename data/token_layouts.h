// What other programs' token files look like, for the reader and the writer of token_file.h.
// Threading: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace strata {

/// No vocabulary is larger: ids are int32.
inline constexpr uint64_t kMaxTokenIds = uint64_t{1} << 31;

// llm.c, dev/data/data_common.py: 256 int32, of which magic, version, number of tokens, then zeros.
inline constexpr size_t kLlmCHeaderBytes = 1024;
inline constexpr int32_t kLlmCMagic16 = 20240520, kLlmCVersion16 = 1;  // "gpt-2"
inline constexpr int32_t kLlmCMagic32 = 20240801, kLlmCVersion32 = 7;  // "llama-3"

/// Megatron's .idx (core/datasets/indexed_dataset.py): "MMIDIDX\0\0", version 1 (u64), id type (u8), the
/// number of sequences (u64) and of document bounds (u64), the sequences' lengths (i32) and byte offsets
/// (i64), and the documents' first sequences (i64), beginning with 0 and ending with the number of sequences.
struct MegatronIndex {
  uint32_t id_bytes = 2;
  uint64_t num_tokens = 0;
  std::vector<uint64_t> document_ends;
};
/// Throws DataError naming the byte.
MegatronIndex ParseMegatronIndex(std::string_view bytes, const std::string& path);
/// An index in which every document is one sequence.
std::string WriteMegatronIndex(const MegatronIndex& index);

/// The .idx that belongs to a .bin.
std::string MegatronIndexPath(const std::string& path);

}  // namespace strata
