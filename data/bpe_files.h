// The published files of byte-level BPE: reading and writing them as a BpeModel. Threading: pure functions.
#pragma once

#include "data/bpe_tokenizer.h"

namespace strata {

/// What a token's text in a vocabulary file stands for: GPT-2 writes each byte as a printable character
/// (encoder.py, bytes_to_unicode). Text with any other character stands for itself.
std::string BytesOfToken(std::string_view token);

/// `model` as a tokenizer.json.
std::string TokenizerJson(const BpeModel& model);

}  // namespace strata
