#include "data/bpe_files.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "data/utf8.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

using nlohmann::json;

// A vocabulary far larger than any is a damaged file: refused before memory is asked for it.
constexpr int64_t kMaxVocabulary = 1 << 22;

// The byte that a character of GPT-2's alphabet stands for, by code point; -1 for other characters.
constexpr auto kByteOfCharacter = [] {
  std::array<int, 324> table{};
  table.fill(-1);
  int moved = 256;  // bytes without a printable Latin-1 character of their own follow from here on
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    table[printable ? byte : moved++] = byte;
  }
  return table;
}();

[[noreturn]] void Refuse(const std::string& where, const std::string& what) {
  throw DataError(StrCat(where, ": ", what));
}

// What lies deeper than any tokenizer.json needs is dropped: the functions below recurse.
json ParseJson(std::string_view text, const std::string& where) {
  try {
    return json::parse(text, [](int depth, auto, auto&) { return depth < 32; });
  } catch (const json::exception& e) {
    throw DataError(StrCat(where, ": not JSON: ", e.what()));
  }
}

using TokenIds = std::unordered_map<std::string, int32_t>;

// A JSON object of token → id. Holes between ids stay empty tokens.
TokenIds ReadVocabulary(const json& vocabulary, const std::string& where, BpeModel* model) {
  if (!vocabulary.is_object()) Refuse(where, "the vocabulary is not an object of token: id");
  TokenIds ids;
  ids.reserve(vocabulary.size());
  for (const auto& [token, id] : vocabulary.items()) {
    if (!id.is_number_integer() || id < 0 || id >= kMaxVocabulary || token.empty()) {
      Refuse(where, StrCat("token \"", token, "\" has the id ", id.dump()));
    }
    const size_t index = id.get<size_t>();
    if (index >= model->tokens.size()) model->tokens.resize(index + 1);
    if (!model->tokens[index].empty()) {
      Refuse(where, StrCat("tokens \"", model->tokens[index], "\" and \"", token, "\" share id ", index));
    }
    model->tokens[index] = token;
    ids.emplace(token, static_cast<int32_t>(index));
  }
  return ids;
}

void AddMerge(std::string_view left, std::string_view right, const TokenIds& ids, const std::string& where,
              BpeModel* model) {
  const auto id_of = [&](const std::string& token) {
    const auto it = ids.find(token);
    if (it == ids.end()) {
      Refuse(where, StrCat("merge ", model->merges.size() + 1, ", \"", left, " ", right,
                           "\", needs the token \"", token, "\", which the vocabulary lacks"));
    }
    return it->second;
  };
  const std::string l(left), r(right);
  const int32_t product = id_of(l + r);
  model->merges.push_back({id_of(l), id_of(r)});
  model->products.push_back(product);
}

// "left right"; a merge has exactly one blank.
void AddMerge(std::string_view pair, const TokenIds& ids, const std::string& where, BpeModel* model) {
  const size_t blank = pair.find(' ');
  if (blank == pair.npos || blank == 0 || blank + 1 == pair.size() ||
      pair.find(' ', blank + 1) != pair.npos) {
    Refuse(where,
           StrCat("merge ", model->merges.size() + 1, " is \"", pair.substr(0, 80), "\", not two tokens"));
  }
  AddMerge(pair.substr(0, blank), pair.substr(blank + 1), ids, where, model);
}

// vocab.bpe or merges.txt: a version line, then a merge a line.
void ReadMerges(std::string_view text, const TokenIds& ids, const std::string& where, BpeModel* model) {
  bool first = true;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    const bool version = first && line.starts_with("#version");
    first = false;
    if (!version && !line.empty()) AddMerge(line, ids, where, model);
  }
}

// In GPT-2's files a special token is an entry that is neither a byte nor what a merge gives.
void FindSpecialTokens(BpeModel* model) {
  std::vector<bool> made(model->tokens.size());
  for (int32_t product : model->products) made[product] = true;
  for (size_t id = 0; id < made.size(); ++id) {
    if (!made[id] && !model->tokens[id].empty() && BytesOfToken(model->tokens[id]).size() > 1) {
      model->special.push_back({model->tokens[id], static_cast<int32_t>(id)});
    }
  }
}

// A member that must be absent, null, false, empty or zero.
void RequireUnset(const json& object, const char* key, const std::string& where) {
  const auto it = object.find(key);
  const bool unset = it == object.end() || it->is_null() || *it == false || *it == "" || *it == 0.0;
  if (!unset) Refuse(where, StrCat("\"", key, "\": ", it->dump().substr(0, 80), " is not supported"));
}

// One part of the pre-tokenizer: GPT-2's own, or a Split by a pattern in front of it.
void ReadPreTokenizer(const json& part, const std::string& where, bool* byte_level, BpeModel* model) {
  const std::string type = part.at("type");
  if (type == "Sequence") {
    for (const json& child : part.at("pretokenizers")) ReadPreTokenizer(child, where, byte_level, model);
  } else if (type == "ByteLevel" && !*byte_level) {
    *byte_level = true;
    model->add_prefix_space = part.value("add_prefix_space", true);
    if (part.value("use_regex", true)) {
      if (!model->pattern.empty()) Refuse(where, "two patterns in one pre-tokenizer are not supported");
      model->pattern = PreTokenizer::kGpt2Pattern;
    }
  } else if (type == "Split" && !*byte_level && model->pattern.empty()) {
    const bool isolated = part.value("behavior", "") == "Isolated" && !part.value("invert", false);
    if (!isolated || !part.at("pattern").contains("Regex")) {
      Refuse(where, "a Split pre-tokenizer other than an isolated regular expression is not supported");
    }
    model->pattern = part.at("pattern").at("Regex");
  } else {
    Refuse(where, StrCat("a pre-tokenizer with \"", type, "\" in this place is not supported"));
  }
}

void ReadAddedTokens(const json& added, const std::string& where, BpeModel* model) {
  for (const json& token : added) {
    const std::string text = token.at("content");
    const int64_t id = token.at("id").get<int64_t>();
    const bool special = token.value("special", false);
    if (text.empty() || id < 0 || id >= kMaxVocabulary) {
      Refuse(where, StrCat("added token ", token.dump().substr(0, 120), " is malformed"));
    }
    for (const char* key : {"lstrip", "rstrip", "single_word"}) {
      if (!special) RequireUnset(token, key, where);
    }
    if (static_cast<size_t>(id) >= model->tokens.size()) model->tokens.resize(id + 1);
    if (!model->tokens[id].empty() && model->tokens[id] != text) {
      Refuse(where, StrCat("tokens \"", model->tokens[id], "\" and \"", text, "\" share id ", id));
    }
    model->tokens[id] = text;
    model->special.push_back({text, static_cast<int32_t>(id), !special});
  }
  std::sort(model->special.begin(), model->special.end(),
            [](const auto& a, const auto& b) { return a.id < b.id; });
}

BpeModel ReadTokenizerJson(const json& file, const std::string& where) {
  const json& model_part = file.at("model");
  if (model_part.value("type", "BPE") != "BPE") {
    Refuse(where, StrCat("a model of type ", model_part.at("type").dump(), " is not byte-level BPE"));
  }
  for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"}) {
    RequireUnset(model_part, key, where);
  }
  RequireUnset(file, "normalizer", where);

  BpeModel model;
  model.pattern.clear();
  bool byte_level = false;
  if (file.contains("pre_tokenizer") && file["pre_tokenizer"].is_object()) {
    ReadPreTokenizer(file["pre_tokenizer"], where, &byte_level, &model);
  }
  if (!byte_level || model.pattern.empty()) {
    Refuse(where, "the pre-tokenizer is not byte-level: this vocabulary is of another kind");
  }
  model.ignore_merges = model_part.value("ignore_merges", false);

  const TokenIds ids = ReadVocabulary(model_part.at("vocab"), where, &model);
  for (const json& merge : model_part.at("merges")) {
    if (merge.is_string()) {
      AddMerge(merge.get_ref<const std::string&>(), ids, where, &model);
    } else {
      AddMerge(merge.at(0).get<std::string>(), merge.at(1).get<std::string>(), ids, where, &model);
    }
  }
  if (file.contains("added_tokens") && !file["added_tokens"].is_null()) {
    ReadAddedTokens(file["added_tokens"], where, &model);
  }
  return model;
}

}  // namespace

std::string BytesOfToken(std::string_view token) {
  std::string bytes;
  for (size_t i = 0; i < token.size();) {
    const size_t length = Utf8SequenceLength(token.substr(i));
    const char32_t code = length == 0 ? ~char32_t{0} : Utf8Decode(token.data() + i, length);
    if (code >= kByteOfCharacter.size() || kByteOfCharacter[code] < 0) return std::string(token);
    bytes += static_cast<char>(kByteOfCharacter[code]);
    i += length;
  }
  return bytes;
}

std::string TokenizerJson(const BpeModel& model) {
  const bool own_pattern = model.pattern != PreTokenizer::kGpt2Pattern;
  const json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", model.add_prefix_space},
                           {"trim_offsets", true},
                           {"use_regex", !own_pattern}};
  json pre_tokenizer = byte_level;
  if (own_pattern) {
    const json split = {{"type", "Split"},
                        {"pattern", {{"Regex", model.pattern}}},
                        {"behavior", "Isolated"},
                        {"invert", false}};
    pre_tokenizer = {{"type", "Sequence"}, {"pretokenizers", {split, byte_level}}};
  }
  json added = json::array();
  for (const SpecialToken& token : model.special) {
    added.push_back({{"id", token.id},
                     {"content", token.text},
                     {"special", !token.always},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false}});
  }
  // The two long members are written as they come: as a tree they would take most of the time of a start.
  std::string vocabulary, merges;
  std::vector<std::string> quoted;
  for (const std::string& token : model.tokens) {
    quoted.push_back(json(token).dump());
    if (token.empty()) continue;
    if (!vocabulary.empty()) vocabulary += ',';
    vocabulary.append(quoted.back()).append(":").append(std::to_string(quoted.size() - 1));
  }
  for (const auto& [left, right] : model.merges) {
    if (!merges.empty()) merges += ',';
    merges.append("[").append(quoted[left]).append(",").append(quoted[right]).append("]");
  }
  return StrCat(R"({"version":"1.0","added_tokens":)", added, R"(,"normalizer":null,"pre_tokenizer":)",
                pre_tokenizer, R"(,"post_processor":null,"decoder":)", byte_level,
                R"(,"model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,)",
                R"("end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"ignore_merges":)",
                model.ignore_merges ? "true" : "false", R"(,"vocab":{)", vocabulary, R"(},"merges":[)",
                merges, "]}}");
}

std::unique_ptr<Tokenizer> ParseTokenizerJson(std::string_view text, const std::string& where) {
  const json file = ParseJson(text, where);
  try {
    return std::make_unique<BpeTokenizer>(ReadTokenizerJson(file, where), where);
  } catch (const json::exception& e) {
    throw DataError(StrCat(where, ": not a tokenizer.json: ", e.what()));
  }
}

std::unique_ptr<Tokenizer> OpenGpt2Tokenizer(FileSystem& fs, const std::string& folder) {
  for (const auto& [vocabulary_name, merges_name] :
       {std::pair("encoder.json", "vocab.bpe"), std::pair("vocab.json", "merges.txt")}) {
    const std::string vocabulary_path = JoinPath(folder, vocabulary_name);
    const std::string merges_path = JoinPath(folder, merges_name);
    if (!fs.Exists(vocabulary_path) || !fs.Exists(merges_path)) continue;
    BpeModel model;
    const json vocabulary = ParseJson(ReadFile(fs, vocabulary_path), vocabulary_path);
    const TokenIds ids = ReadVocabulary(vocabulary, vocabulary_path, &model);
    ReadMerges(ReadFile(fs, merges_path), ids, merges_path, &model);
    FindSpecialTokens(&model);
    return std::make_unique<BpeTokenizer>(std::move(model), vocabulary_path);
  }
  const std::string json_path = JoinPath(folder, "tokenizer.json");
  if (fs.Exists(json_path)) return ParseTokenizerJson(ReadFile(fs, json_path), json_path);
  throw DataError(StrCat(folder, ": no GPT-2 vocabulary here"),
                  "it is encoder.json with vocab.bpe, vocab.json with merges.txt, or tokenizer.json");
}

}  // namespace strata
