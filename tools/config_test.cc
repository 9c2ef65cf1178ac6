#include "tools/config.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <random>
#include <regex>

#include "runtime/base/error.h"

namespace strata {
namespace {

RunConfig Parse(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  return RunConfig::Parse(yaml, "x.yaml", overrides);
}

// What a ConfigError said; empty when there was none.
struct Refusal {
  std::string what, hint;
  bool Says(const std::string& text) const { return what.find(text) != std::string::npos; }
};
template <typename Function>
Refusal RefusalOf(const Function& function) {
  try {
    function();
  } catch (const ConfigError& error) {
    return {error.what(), error.hint()};
  }
  return {};
}
Refusal ParseRefusal(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  return RefusalOf([&] { Parse(yaml, overrides); });
}
Refusal ResolveRefusal(const std::string& yaml, int world, int64_t vocabulary = 100) {
  return RefusalOf([&] { Parse(yaml).Resolve(world, vocabulary); });
}

// Every key, none at its default.
constexpr char kEverything[] = R"(
run: {dir: runs/x y, seed: 18446744073709551615, resume: auto}
model:
  type: llama
  preset: llama2-7b
  num_layers: 3
  hidden_size: 48
  num_heads: 4
  num_kv_heads: 2
  head_dim: 16
  ffn_hidden_size: 96
  max_seq_len: 64
  vocab_size: 512
  num_token_types: 3
  tie_embeddings: true
  bias: true
  positions: learned
  rope_theta: 5e5
  norm: layer_norm
  norm_eps: 1e-6
  activation: relu
  gated: false
  dropout: 0.1
  init_std: 0.01
  init_from: old/run
  freeze: [embedding, blocks.0.]
data: {train: [a.txt, "b c.bin"], mix: [0.5, 2], samples: documents, valid: [v.txt], valid_split: 0.25, tokenizer: "gpt2:folder", seq_len: 32,
  mask_rate: 0.2, mask_token: 500,
  curriculum: {index: elsewhere,
    seqlen: {by: value, pacing: root, min: 3, max: 30, steps: 11, root: 3, difficulty_step: 3},
    vocab_rarity: {min: 10, steps: 12},
    total_rarity: {pacing: discrete, stages: [[5, 10], [6, 100]]},
    loss: {min: 20, max: 80, steps: 13}, own: {metric: age, min: 30, steps: 14},
    length: {mode: reshape, min: 8, steps: 15, difficulty_step: 8}, batch_size: {min: 6, max: 18, steps: 16}},
  random_ltd: {min: 16, max: 32, steps: 17, difficulty_step: 4}}
train: {global_batch_size: 24, micro_batch_size: 3, gradient_accumulation_steps: 4, max_steps: 77, max_tokens: 1e6,
        precision: bf16, clip_grad_norm: 0.5, log_interval: 3, eval_interval: 5, eval_batches: 7}
optimizer: {type: lion, lr: 3e-5, betas: [0.8, 0.88], eps: 1e-7, weight_decay: 0.2, momentum: 0.5}
schedule: {type: wsd, by: tokens, warmup_steps: 6, warmup_tokens: 600, min_lr_ratio: 0.3, total_steps: 70,
           total_tokens: 7000, decay_start: 60}
parallel: {tensor: 2, expert: 1, sequence_parallel: true, backend: threads, ranks: 2, timeout_s: 1.5}
zero:
  stage: 2
  reduce: micro_batch
  reduce_dtype: bf16
  overlap: false
  bucket_bytes: 1MiB
  prefetch_bytes: 0
  persistence_threshold: 1e5
  max_live_bytes: 1.5GiB
  offload:
    {optimizer: nvme, parameters: host, gradients: host, ratio: 0.75,
     nvme: {path: /mnt/nvme, sub_group_bytes: 16MiB, buffers: 4, block_bytes: 12KiB, queue_depth: 32}}
recompute: {policy: selective, offload: host, stash_collectives: false}
checkpoint: {interval: 9, keep: 4, async: false}
device: {type: cpu, attention: cudnn, threads: 5, memory_limit: 8GiB}
)";

void CheckEverything(const RunConfig& c) {
  CHECK(c.run.dir == "runs/x y");
  CHECK(c.run.seed == UINT64_MAX);
  CHECK(c.run.resume == Resume::kAuto);
  const ModelSection& m = c.model;
  CHECK(m.type == ModelType::kLlama);
  CHECK(m.sizes.num_token_types == 3);
  CHECK(c.data.mask_rate == 0.2);
  CHECK(c.data.mask_token == 500);
  CHECK(m.preset == "llama2-7b");
  CHECK(m.sizes.num_layers == 3);
  CHECK(m.sizes.hidden_size == 48);
  CHECK(m.sizes.num_heads == 4);
  CHECK(m.sizes.num_kv_heads == 2);
  CHECK(m.sizes.head_dim == 16);
  CHECK(m.sizes.ffn_hidden_size == 96);
  CHECK(m.sizes.max_seq_len == 64);
  CHECK(m.sizes.vocab_size == 512);
  CHECK(m.sizes.tie_embeddings);
  CHECK(m.sizes.bias);
  CHECK(m.sizes.learned_positions);
  CHECK(m.sizes.rope_theta == 5e5);
  CHECK(m.sizes.norm == NormKind::kLayerNorm);
  CHECK(m.sizes.norm_eps == 1e-6);
  CHECK(m.sizes.activation == Activation::kRelu);
  CHECK_FALSE(m.sizes.gated);
  CHECK(m.sizes.dropout == 0.1);
  CHECK(m.sizes.init_std == 0.01);
  CHECK(m.init_from == "old/run");
  CHECK(m.freeze == std::vector<std::string>{"embedding", "blocks.0."});
  CHECK(c.data.train == std::vector<std::string>{"a.txt", "b c.bin"});
  CHECK(c.data.valid == std::vector<std::string>{"v.txt"});
  CHECK(c.data.valid_split == 0.25);
  CHECK(c.data.tokenizer == "gpt2:folder");
  CHECK(c.data.seq_len == 32);
  CHECK(c.data.mix == std::vector<double>{0.5, 2});
  CHECK(c.data.packed);
  const CurriculumSection& u = c.data.curriculum;
  CHECK(u.index == "elsewhere");
  CHECK(u.seqlen == CurriculumOptions::Criterion{"seqlen", true, {PacingType::kRoot, 3, 30, 11, 3, 3}});
  CHECK(u.vocab_rarity == CurriculumOptions::Criterion{"vocab_rarity", false, {.min = 10, .steps = 12}});
  CHECK(u.total_rarity.pacing == Pacing{.type = PacingType::kDiscrete, .stages = {{5, 10}, {6, 100}}});
  CHECK(u.loss.pacing == Pacing{.min = 20, .max = 80, .steps = 13});
  CHECK(u.own == CurriculumOptions::Criterion{"age", false, {.min = 30, .steps = 14}});
  CHECK(u.length == Pacing{.min = 8, .steps = 15, .difficulty_step = 8});
  CHECK(u.reshape);
  CHECK(u.batch_size == Pacing{.min = 6, .max = 18, .steps = 16});
  CHECK(c.data.random_ltd == Pacing{.min = 16, .max = 32, .steps = 17, .difficulty_step = 4});
  CHECK(c.train.global_batch_size == 24);
  CHECK(c.train.micro_batch_size == 3);
  CHECK(c.train.gradient_accumulation_steps == 4);
  CHECK(c.train.max_steps == 77);
  CHECK(c.train.max_tokens == 1'000'000);
  CHECK(c.train.precision == DType::kBF16);
  CHECK(c.train.clip_grad_norm == 0.5);
  CHECK(c.train.log_interval == 3);
  CHECK(c.train.eval_interval == 5);
  CHECK(c.train.eval_batches == 7);
  CHECK(c.optimizer.type == OptimizerType::kLion);
  CHECK(c.optimizer.lr == 3e-5);
  CHECK(c.optimizer.beta1 == 0.8);
  CHECK(c.optimizer.beta2 == 0.88);
  CHECK(c.optimizer.eps == 1e-7);
  CHECK(c.optimizer.weight_decay == 0.2);
  CHECK(c.optimizer.momentum == 0.5);
  CHECK(c.schedule.type == ScheduleType::kWsd);
  CHECK(c.schedule.by == ScheduleUnit::kTokens);
  CHECK(c.schedule.warmup_steps == 6);
  CHECK(c.schedule.warmup_tokens == 600);
  CHECK(c.schedule.total_tokens == 7000);
  CHECK(c.schedule.min_lr_ratio == 0.3);
  CHECK(c.schedule.total_steps == 70);
  CHECK(c.schedule.decay_start == 60);
  CHECK(c.parallel.tensor == 2);
  CHECK(c.parallel.sequence_parallel);
  CHECK(c.parallel.backend == Backend::kThreads);
  CHECK(c.parallel.ranks == 2);
  CHECK(c.parallel.timeout_s == 1.5);
  CHECK(c.zero.stage == 2);
  CHECK(c.zero.reduce == ZeroOptions::Reduce::kMicroBatch);
  CHECK(c.zero.reduce_dtype == DType::kBF16);
  CHECK_FALSE(c.zero.overlap);
  CHECK(c.zero.bucket_bytes == 1 << 20);
  CHECK(c.zero.prefetch_bytes == 0);
  CHECK(c.zero.persistence_threshold == 100'000);
  CHECK(c.zero.max_live_bytes == int64_t{3} << 29);
  const OffloadOptions& offload = c.zero.offload;
  CHECK(offload.optimizer == Tier::kNvme);
  CHECK(offload.parameters == Tier::kHost);
  CHECK(offload.gradients == Tier::kHost);
  CHECK(offload.ratio == 0.75);
  CHECK(offload.path == "/mnt/nvme");
  CHECK(offload.sub_group_bytes == 16 << 20);
  CHECK(offload.buffers == 4);
  CHECK(offload.block_bytes == 3 * 4096);
  CHECK(offload.queue_depth == 32);
  CHECK(c.recompute.policy == RecomputePolicy::kSelective);
  CHECK(c.recompute.offload == Tier::kHost);
  CHECK_FALSE(c.recompute.stash_collectives);
  CHECK(c.checkpoint.interval == 9);
  CHECK(c.checkpoint.keep == 4);
  CHECK_FALSE(c.checkpoint.async);
  CHECK(c.device.type == DeviceChoice::kCpu);
  CHECK(c.device.attention == AttentionChoice::kCudnn);
  CHECK(c.device.threads == 5);
  CHECK(c.device.memory_limit == int64_t{8} << 30);
}

TEST_CASE("Every key arrives where it belongs, and survives being written and read again") {
  const RunConfig config = Parse(kEverything);
  CheckEverything(config);
  const std::string yaml = config.ToYaml();
  CheckEverything(Parse(yaml));
  CHECK(Parse(yaml).ToYaml() == yaml);
}

TEST_CASE("A resolved configuration runs again as it is") {
  for (const char* yaml :
       {"train: {global_batch_size: 8}", "model: {preset: llama3-8b}\ntrain: {micro_batch_size: 1}",
        "model: {type: llama}\ntrain: {micro_batch_size: 1}\nschedule: {type: wsd}",
        "train: {global_batch_size: 8, micro_batch_size: 1, max_tokens: 1e6}\nschedule: {by: tokens, type: "
        "wsd}\n"
        "data: {curriculum: {loss: {min: 5, steps: 9}, length: {min: 8, steps: 9}, batch_size: {min: 2, "
        "steps: "
        "9, difficulty_step: 2}}, random_ltd: {min: 16, steps: 40}}"}) {
    RunConfig config = Parse(yaml);
    config.Resolve(2, 300);
    RunConfig again = Parse(config.ToYaml());
    CHECK(again.ToYaml() == config.ToYaml());
    again.Resolve(2, 300);
    CHECK(again.ToYaml() == config.ToYaml());
  }
}

TEST_CASE("Where a run was resumed from on the command line is not part of its configuration") {
  RunConfig config;
  config.run.resume = Resume::kPath;
  config.run.resume_path = "elsewhere";
  CHECK(Parse(config.ToYaml()).run.resume == Resume::kNever);
}

TEST_CASE(
    "Case 10: misspelt, nested, duplicate and mistyped keys are refused together, with place and nearest "
    "key") {
  const Refusal refusal = ParseRefusal(R"(run: {dir: here}
train:
  max_steps: 10
  gradient_clipp1ng: 1.0
  max_steps: 20
model:
  num_layer: 4
  num_heads: four
optimizer:
  warmup_steps: 10
  lr: 1e-3
schedule:
  warm_up_steps: 10
)",
                                       {"train.lr=1e-3", "optimizer.lr=fast"});
  CHECK(refusal.what ==
        "x.yaml:4:3: unknown key 'gradient_clipp1ng' in train (did you mean 'clip_grad_norm'?)\n"
        "x.yaml:5:3: duplicate key 'max_steps', first on line 3\n"
        "x.yaml:7:3: unknown key 'num_layer' in model (did you mean 'num_layers'?)\n"
        "x.yaml:8:14: model.num_heads: expected an integer from 1 to 4096, found 'four'\n"
        "x.yaml:10:3: unknown key 'warmup_steps' in optimizer (did you mean 'schedule.warmup_steps'?)\n"
        "x.yaml:13:3: unknown key 'warm_up_steps' in schedule (did you mean 'warmup_steps'?)\n"
        "command line: train.lr=1e-3: unknown key 'lr' in train (did you mean 'optimizer.lr'?)\n"
        "command line: optimizer.lr=fast: optimizer.lr: expected a number ≥ 0, found 'fast'");
  CHECK_FALSE(refusal.hint.empty());
}

TEST_CASE("Names that other programs use lead to ours") {
  CHECK(ParseRefusal("model: {n_embd: 3}").Says("did you mean 'hidden_size'?"));
  CHECK(ParseRefusal("optimizer: {learning_rate: 3}").Says("did you mean 'lr'?"));
  CHECK(ParseRefusal("train: {learning_rate: 3}").Says("did you mean 'optimizer.lr'?"));
  CHECK(ParseRefusal("train: {train_micro_batch_size_per_gpu: 3}").Says("did you mean 'micro_batch_size'?"));
  CHECK(ParseRefusal("scheduler: {}").Says("did you mean 'schedule'?"));
}

TEST_CASE("What DeepSpeed calls the settings of ZeRO leads to ours, at whatever level it stands") {
  const std::pair<const char*, const char*> names[] = {
      {"reduce_bucket_size", "bucket_bytes"},
      {"overlap_comm", "overlap"},
      {"stage3_prefetch_bucket_size", "prefetch_bytes"},
      {"stage3_param_persistence_threshold", "persistence_threshold"},
      {"stage3_max_live_parameters", "max_live_bytes"},
      {"offload_optimizer", "zero.offload.optimizer"},
      {"offload_param", "zero.offload.parameters"},
      {"sub_group_size", "zero.offload.nvme.sub_group_bytes"},
      {"nvme_path", "zero.offload.nvme.path"},
      {"buffer_count", "zero.offload.nvme.buffers"},
      {"block_size", "zero.offload.nvme.block_bytes"},  // not a model's length, which others call so
      {"queue_depth", "zero.offload.nvme.queue_depth"},
  };
  for (const auto& [theirs, ours] : names) {
    CHECK(ParseRefusal(StrCat("zero: {", theirs, ": 1}")).Says(StrCat("(did you mean '", ours, "'?)")));
  }
  CHECK(ParseRefusal("zero_optimization: {stage: 3}").Says("did you mean 'zero'?"));
  CHECK(ParseRefusal("", {"zero.nvme.path=/mnt"}).Says("did you mean 'zero.offload.nvme.path'?"));
  CHECK(ParseRefusal("zero: {offload: {nvme: {block_size: 1}}}").Says("(did you mean 'block_bytes'?)"));
  CHECK(ParseRefusal("zero: {offload: {optimizer: cpu}}").what ==
        "x.yaml:1:29: zero.offload.optimizer: cpu: the host's memory is called host");
}

TEST_CASE("Values of tiers are checked") {
  CHECK(ParseRefusal("zero: {offload: {nvme: {block_bytes: 5000}}}").what ==
        "x.yaml:1:38: zero.offload.nvme.block_bytes: expected bytes such as 8GiB, a multiple of 4KiB, found "
        "'5000'");
  CHECK(ParseRefusal("zero: {offload: {ratio: 1.5}}").Says("expected a number in [0, 1], found '1.5'"));
  CHECK(ParseRefusal("zero: {offload: host}").Says("zero.offload: expected keys, found 'host'"));
  CHECK(ParseRefusal("zero: {reduce_dtype: fp16}").Says("expected fp32 or bf16"));
  CHECK(ParseRefusal("zero: {max_live_bytes: 0}").Says("expected null or bytes"));
  CHECK(Parse("zero: {max_live_bytes: null}").zero.max_live_bytes == INT64_MAX);
  CHECK(Parse("", {"zero.offload={parameters: nvme, nvme: {path: /x}}"}).zero.offload.path == "/x");
  CHECK(ResolveRefusal("train: {micro_batch_size: 1}\nzero: {offload: {optimizer: nvme}}", 1)
            .Says("zero.offload.nvme.path names no folder"));
}

TEST_CASE("What this build does not have is refused by name") {
  CHECK(Parse("device: {type: cuda}").device.type == DeviceChoice::kCuda);  // to plan for another machine
  CHECK(Parse("").device.attention == AttentionChoice::kStrata);
  CHECK(ParseRefusal("device: {attention: flash}").Says("expected strata or cudnn, found 'flash'"));
  const std::string on_cpu = "train: {micro_batch_size: 1}\ndevice: {attention: cudnn, type: ";
  CHECK(ResolveRefusal(on_cpu + "cpu}", 1).Says("device: attention cudnn is for GPUs, and type is cpu"));
  CHECK(ResolveRefusal(on_cpu + "cuda}", 1).what.empty());
  CHECK(ParseRefusal("parallel: {backend: nccl}").Says("nccl: ranks on GPUs use NCCL by themselves"));
  CHECK(ParseRefusal("parallel: {tensor: 0}").Says("expected an integer from 1 to 1024, found '0'"));
}

TEST_CASE("Family, then preset, then explicit keys, in whatever order the file has them") {
  const RunConfig gpt = Parse("model: {num_heads: 4}");
  CHECK(gpt.model.sizes.norm == NormKind::kLayerNorm);
  CHECK(gpt.model.sizes.num_kv_heads == 0);

  const RunConfig llama = Parse("model: {bias: true, num_layers: 2, type: llama}");
  const TransformerConfig& l = llama.model.sizes;
  CHECK(l.norm == NormKind::kRmsNorm);
  CHECK_FALSE(l.learned_positions);
  CHECK(l.gated);
  CHECK(l.activation == Activation::kSilu);
  CHECK_FALSE(l.tie_embeddings);
  CHECK(l.bias);
  CHECK(l.num_layers == 2);

  const RunConfig preset = Parse("model: {hidden_size: 1024, preset: llama2-7b}", {"model.num_layers=2"});
  CHECK(preset.model.type == ModelType::kLlama);
  CHECK(preset.model.sizes.hidden_size == 1024);
  CHECK(preset.model.sizes.num_layers == 2);
  CHECK(preset.model.sizes.ffn_hidden_size == 11008);

  CHECK(Parse("model: {preset: llama2-7b}", {"model.preset=gpt2-124m"}).model.sizes.gated == false);
  CHECK(Parse("model: {preset: llama2-7b}", {"model.preset=null"}).model.sizes.num_layers == 6);
  CHECK(ParseRefusal("model: {type: gpt, preset: llama2-7b}")
            .Says("x.yaml:1:28: model.preset: 'llama2-7b' is not of"));
  CHECK(ParseRefusal("model: {preset: gpt2-124}").Says("no preset 'gpt2-124' (did you mean 'gpt2-124m'?)"));
}

TEST_CASE("A bert sees both ways, and its mask is a token of its vocabulary") {
  RunConfig bert = Parse("model: {type: bert, vocab_size: 300}\ntrain: {micro_batch_size: 1}");
  const TransformerConfig& c = bert.model.sizes;
  CHECK((!c.causal && c.post_norm && c.head_transform && c.num_token_types == 2));
  CHECK(c.activation == Activation::kGeluErf);
  CHECK(c.norm_eps == 1e-12);
  CHECK(bert.data.mask_rate == 0.15);
  CHECK(bert.data.mask_token == -1);
  bert.data.mask_token = 299;
  bert.Resolve(1, 0);
  const RunConfig again = Parse(bert.ToYaml());
  CHECK(again.data.mask_token == 299);
  CHECK_FALSE(again.model.sizes.causal);
  bert.data.mask_token = 300;
  CHECK_THROWS_WITH(bert.Resolve(1, 0), Catch::Contains("mask_token 300 is none of model.vocab_size 300"));

  const RunConfig preset = Parse("model: {preset: bert-large, num_layers: 3}");
  CHECK(preset.model.type == ModelType::kBert);
  CHECK(preset.model.sizes.hidden_size == 1024);
  CHECK_FALSE(preset.model.sizes.causal);
  CHECK(ParseRefusal("data: {mask_rate: 0}").Says("mask_rate"));
}

TEST_CASE("Batch sizes follow from any two, or one") {
  struct Row {
    const char* train;
    int world;
    int64_t global, micro, accumulation;
  };
  const Row rows[] = {
      {"{global_batch_size: 32, micro_batch_size: 4, gradient_accumulation_steps: 4}", 2, 32, 4, 4},
      {"{global_batch_size: 32, micro_batch_size: 4}", 2, 32, 4, 4},
      {"{global_batch_size: 32, gradient_accumulation_steps: 2}", 2, 32, 8, 2},
      {"{micro_batch_size: 4, gradient_accumulation_steps: 3}", 2, 24, 4, 3},
      {"{global_batch_size: 32}", 4, 32, 8, 1},
      {"{micro_batch_size: 5}", 3, 15, 5, 1},
      {"{gradient_accumulation_steps: 6}", 2, 12, 1, 6},
  };
  for (const Row& row : rows) {
    CAPTURE(row.train);
    RunConfig config = Parse(std::string("train: ") + row.train);
    config.Resolve(row.world, 10);
    CHECK(config.train.global_batch_size == row.global);
    CHECK(config.train.micro_batch_size == row.micro);
    CHECK(config.train.gradient_accumulation_steps == row.accumulation);
  }
}

// The suggestions "train.KEY=VALUE" of a hint, each tried in place of what was wrong.
void CheckSuggestionsWork(const std::string& yaml, int world, const Refusal& refusal) {
  CAPTURE(yaml, refusal.what, refusal.hint);
  const std::regex suggestion(R"((train\.\w+=\d+))");
  int count = 0;
  for (auto it = std::sregex_iterator(refusal.hint.begin(), refusal.hint.end(), suggestion);
       it != std::sregex_iterator(); ++it, ++count) {
    RunConfig mended = Parse(yaml, {it->str()});
    CHECK_NOTHROW(mended.Resolve(world, 100));
  }
  CHECK(count > 0);
}

TEST_CASE("Case 11: global batch 10, micro-batch 4, 2 ranks, each left out in turn") {
  const std::string global_out = "train: {micro_batch_size: 4, gradient_accumulation_steps: 2}";
  RunConfig config = Parse(global_out);
  config.Resolve(2, 100);
  CHECK(config.train.global_batch_size == 16);

  const std::string accumulation_out = "train: {global_batch_size: 10, micro_batch_size: 4}";
  Refusal refusal = ResolveRefusal(accumulation_out, 2);
  CHECK(refusal.what == "train: global_batch_size 10 is no multiple of micro_batch_size 4 × 2 ranks = 8");
  CHECK(refusal.hint ==
        "choose train.global_batch_size=8 or train.global_batch_size=16 or train.micro_batch_size=5");
  CheckSuggestionsWork(accumulation_out, 2, refusal);

  const std::string micro_out = "train: {global_batch_size: 10, gradient_accumulation_steps: 2}";
  refusal = ResolveRefusal(micro_out, 2);
  CHECK(refusal.what ==
        "train: global_batch_size 10 is no multiple of gradient_accumulation_steps 2 × 2 ranks = 4");
  CheckSuggestionsWork(micro_out, 2, refusal);

  const std::string all =
      "train: {global_batch_size: 10, micro_batch_size: 4, gradient_accumulation_steps: 2}";
  refusal = ResolveRefusal(all, 2);
  CHECK(
      refusal.what ==
      "train: global_batch_size 10 is not micro_batch_size 4 × gradient_accumulation_steps 2 × 2 ranks = 16");
  CheckSuggestionsWork(all, 2, refusal);

  const std::string global_only = "train: {global_batch_size: 10}";
  refusal = ResolveRefusal(global_only, 3);
  CHECK(refusal.what == "train: global_batch_size 10 is no multiple of 3 ranks");
  CheckSuggestionsWork(global_only, 3, refusal);

  refusal = ResolveRefusal("train: {}", 2);
  CHECK(refusal.Says("no batch size is given, for 2 ranks"));
  CheckSuggestionsWork("train: {}", 2, refusal);
}

TEST_CASE("Every contradiction of small batches has suggestions that work") {
  for (int world = 1; world <= 4; ++world) {
    for (int global = 1; global <= 7; ++global) {
      for (int micro = 0; micro <= 3; ++micro) {
        for (int accumulation = 0; accumulation <= 3; ++accumulation) {
          std::string yaml = StrCat("train: {global_batch_size: ", global);
          if (micro > 0) yaml += StrCat(", micro_batch_size: ", micro);
          if (accumulation > 0) yaml += StrCat(", gradient_accumulation_steps: ", accumulation);
          yaml += "}";
          RunConfig config = Parse(yaml);
          const Refusal refusal = RefusalOf([&] { config.Resolve(world, 100); });
          if (!refusal.what.empty()) {
            CheckSuggestionsWork(yaml, world, refusal);
            continue;
          }
          const TrainSection& t = config.train;
          CHECK(t.global_batch_size == t.micro_batch_size * t.gradient_accumulation_steps * world);
          CHECK(t.global_batch_size == global);
        }
      }
    }
  }
}

TEST_CASE("Lengths, vocabulary and steps follow from one another") {
  RunConfig config = Parse("train: {micro_batch_size: 2, max_steps: 50}\nmodel: {max_seq_len: 32}");
  config.Resolve(1, 0);
  CHECK(config.model.sizes.vocab_size == 0);  // not known yet
  CHECK(config.model.sizes.head_dim == 64);
  CHECK(config.model.sizes.num_kv_heads == 6);
  config.Resolve(1, 300);
  CHECK(config.model.sizes.vocab_size == 300);
  CHECK(config.data.seq_len == 32);
  CHECK(config.schedule.total_steps == 50);

  config = Parse("train: {micro_batch_size: 2, max_steps: 50, max_tokens: 65}\ndata: {seq_len: 8}");
  config.Resolve(2, 300);
  CHECK(config.schedule.total_steps == 3);  // of 32 tokens

  config = Parse(
      "optimizer: {lr: 1}\nschedule: {type: linear, warmup_steps: 2, min_lr_ratio: 0}\n"
      "train: {micro_batch_size: 1, max_steps: 6}");
  config.Resolve(1, 300);
  const Schedule schedule = config.MakeSchedule();
  CHECK(schedule.At(1) == 0.5);
  CHECK(schedule.At(4) == 0.5);
  CHECK(schedule.At(6) == 0.0);

  config = Parse("schedule: {type: wsd}\ntrain: {micro_batch_size: 1, max_steps: 100}");
  config.Resolve(1, 300);
  CHECK(config.schedule.decay_start == 90);
}

TEST_CASE("Contradictions are refused with their numbers, all at once") {
  const std::string batch = "train: {micro_batch_size: 1, max_steps: 100}\n";
  CHECK(ResolveRefusal(batch + "data: {seq_len: 512}", 1).what ==
        "data: seq_len 512 is longer than model.max_seq_len 256");
  CHECK(ResolveRefusal(batch + "model: {vocab_size: 99}", 1).what ==
        "model: vocab_size 99 does not hold the tokenizer's 100 tokens");
  CHECK(ResolveRefusal(batch + "model: {vocab_size: 128}", 1).what.empty());
  CHECK(ResolveRefusal(batch + "schedule: {warmup_steps: 101}", 1).what ==
        "schedule: warmup_steps 101 is more than its total of 100 steps");
  CHECK(ResolveRefusal(batch + "schedule: {warmup_steps: 100}", 1).what.empty());
  CHECK(ResolveRefusal(batch + "schedule: {type: wsd, warmup_steps: 50, decay_start: 40}", 1)
            .Says("decay_start 40 is not between warmup_steps 50 and the total of 100 steps"));
  CHECK(ResolveRefusal(batch + "data: {valid: [v], valid_split: 0.1}", 1).Says("both say what validates"));
  CHECK(ResolveRefusal(batch + "model: {gated: true}", 1).Says("gated is SwiGLU"));
  CHECK(ResolveRefusal(batch + "zero: {stage: 2, reduce: step}", 1).Says("zero.reduce"));
  for (const char* policy : {"none", "selective"}) {
    CHECK(ResolveRefusal(batch + "recompute: {offload: host, policy: " + policy + "}", 1)
              .Says("offload host is for what policy full keeps"));
  }
  CHECK(ResolveRefusal(batch + "recompute: {offload: host, policy: full}", 1).what.empty());
  const std::string on_nvme = batch + "recompute: {offload: nvme, policy: full}\n";
  CHECK(ResolveRefusal(on_nvme, 1).Says("zero.offload.nvme.path names no folder"));
  CHECK(ResolveRefusal(on_nvme + "zero: {offload: {nvme: {path: /mnt}}}", 1).what.empty());
  CHECK(ResolveRefusal(batch + "parallel: {ranks: 2}", 1).Says("ranks 2 are threads"));
  CHECK(ResolveRefusal(batch + "parallel: {ranks: 2, backend: threads}", 2).what.empty());
  CHECK(ResolveRefusal(batch + "model: {hidden_size: 100}", 1)
            .Says("hidden_size 100 is no multiple of num_heads 6"));
  CHECK(ResolveRefusal("train: {micro_batch_size: 1000000, gradient_accumulation_steps: 1000000}", 1)
            .Says("= 1000000000000 is more than"));

  const Refusal several = ResolveRefusal(
      "train: {global_batch_size: 3}\ndata: {seq_len: 999}\nmodel: {num_heads: 5}\nzero: {stage: 3, reduce: "
      "step}\n"
      "schedule: {warmup_steps: 5000}",
      2);
  CHECK(std::count(several.what.begin(), several.what.end(), '\n') == 4);
  CHECK(std::count(several.hint.begin(), several.hint.end(), '\n') == 4);
}

TEST_CASE("A curriculum that contradicts itself or the run is refused: what, where, and what to do") {
  const std::string batch =
      "train: {global_batch_size: 24, micro_batch_size: 3, max_steps: 100}\nmodel: {max_seq_len: 64}\n";
  const auto with = [&](const std::string& curriculum) {
    const Refusal refusal = ResolveRefusal(batch + "data: {curriculum: {" + curriculum + "}}", 2);
    CHECK(refusal.hint.empty() == refusal.what.empty());
    return refusal.what;
  };
  CHECK(with("loss: {min: 1, steps: 10}").empty());
  CHECK(with("loss: {min: 0, steps: 10}") == "data.curriculum.loss: min is 0");
  CHECK(with("loss: {min: 10, max: 101, steps: 10}") == "data.curriculum.loss: max is 101");
  CHECK(with("loss: {min: 10, steps: 10, difficulty_step: 7}") ==
        "data.curriculum.loss: difficulty_step 7 does not divide max 100");
  CHECK(with("seqlen: {by: value}") == "data.curriculum.seqlen: steps is missing");
  CHECK(with("seqlen: {pacing: discrete}") ==
        "data.curriculum.seqlen: pacing is discrete, and no stages are given");
  CHECK(with("own: {metric: age}") == "data.curriculum.own: steps is missing");
  CHECK(with("own: {min: 1, steps: 5}") == "data.curriculum.own: metric is missing");
  CHECK(with("length: {min: 8, max: 65, steps: 10}") == "data.curriculum.length: max is 65");
  CHECK(with("batch_size: {min: 6, steps: 10, difficulty_step: 6}").empty());
  CHECK(with("batch_size: {min: 6, steps: 10}") ==
        "data.curriculum.batch_size: its sizes are multiples of 1, and a step takes multiples of 6: "
        "micro_batch_size × ranks");
  CHECK(ParseRefusal("data: {curriculum: {loss: {stages: [[1, 2], [3]]}}}")
            .Says("data.curriculum.loss.stages"));
  CHECK(ParseRefusal("data: {curriculum: {losses: {}}}").Says("did you mean"));

  CHECK(ResolveRefusal(batch + "data: {random_ltd: {min: 16, steps: 10}}", 1).what.empty());
  CHECK(ResolveRefusal(batch + "data: {random_ltd: {min: 16, max: 65, steps: 10}}", 1).what ==
        "data.random_ltd: max is 65");
  CHECK(ResolveRefusal("train: {micro_batch_size: 1}\nmodel: {num_layers: 2}\ndata: {random_ltd: {min: 16, "
                       "steps: 10}}",
                       1)
            .Says("the first layer and the last compute every token, and model.num_layers is 2"));
  const std::string shared = batch + "parallel: {tensor: 2, sequence_parallel: true}\ndata: ";
  CHECK(ResolveRefusal(shared + "{random_ltd: {min: 16, steps: 10}}", 2).Says("sequence_parallel cuts"));
  CHECK(ResolveRefusal(shared + "{curriculum: {length: {min: 8, steps: 10, difficulty_step: 8}}}", 2)
            .what.empty());
  CHECK(ResolveRefusal(shared + "{curriculum: {length: {min: 8, steps: 10}}}", 2)
            .Says("its lengths are multiples of 1, and sequence_parallel shares micro_batch_size 3"));
}

TEST_CASE("A mixture has a weight for each entry, and is no curriculum") {
  const auto with = [](const std::string& data) {
    return ResolveRefusal("train: {micro_batch_size: 1}\ndata: {train: [a, b], " + data + "}", 1).what;
  };
  CHECK(with("mix: [1, 0.5]").empty());
  CHECK(with("mix: [1, 1, 1]") == "data.mix: 3 weights for 2 entries of data.train");
  CHECK(with("mix: [0, 0]") == "data.mix: all weights are 0");
  CHECK(with("mix: [1, 2], curriculum: {loss: {min: 1, steps: 5}}") ==
        "data.mix and data.curriculum both say which samples come");
}

TEST_CASE("Steps to so many tokens are counted with the curriculum's lengths and batches") {
  // 4 × 8, 4 × 16, 8 × 24 and then 8 × 32 tokens a step.
  const std::string yaml =
      "model: {max_seq_len: 32}\ndata: {curriculum: {length: {pacing: discrete, stages: [[3, 8], [6, 16], "
      "[7, "
      "24]]}, batch_size: {pacing: discrete, stages: [[6, 4]]}}}\n";
  for (int64_t tokens = 1; tokens < 2000; tokens += 7) {
    int64_t steps = 0;
    for (int64_t consumed = 0; consumed < tokens; ++steps)
      consumed += steps < 3 ? 32 : steps < 6 ? 64 : steps < 7 ? 192 : 256;
    RunConfig config =
        Parse(yaml + StrCat("train: {global_batch_size: 8, micro_batch_size: 4, max_tokens: ", tokens,
                            ", max_steps: 9}"));
    config.Resolve(1, 100);
    INFO(tokens);
    CHECK(config.schedule.total_steps == std::min<int64_t>(steps, 9));
  }
}

TEST_CASE("A schedule by tokens wants its keys in tokens, and a total") {
  const std::string batch = "train: {micro_batch_size: 1}\n";
  CHECK(
      ResolveRefusal(batch + "schedule: {by: tokens, total_tokens: 100, warmup_tokens: 9}", 1).what.empty());
  CHECK(ResolveRefusal("train: {micro_batch_size: 1, max_tokens: 100}\nschedule: {by: tokens}", 1)
            .what.empty());
  CHECK(ResolveRefusal(batch + "schedule: {by: tokens, type: constant}", 1).what.empty());
  CHECK(ResolveRefusal(batch + "schedule: {by: tokens}", 1).what ==
        "schedule: it goes by tokens, and total_tokens is missing");
  CHECK(
      ResolveRefusal("train: {micro_batch_size: 1, max_tokens: 100}\nschedule: {by: layer_tokens}", 1).what ==
      "schedule: it goes by tokens, and total_tokens is missing");
  CHECK(ResolveRefusal(batch + "schedule: {by: tokens, total_tokens: 100, warmup_steps: 9}", 1).what ==
        "schedule: warmup_steps or total_steps is given, and the schedule goes by tokens");
  CHECK(ResolveRefusal(batch + "schedule: {warmup_tokens: 9}", 1).what ==
        "schedule: warmup_tokens or total_tokens is given, and the schedule goes by steps");
  CHECK(ResolveRefusal(batch + "schedule: {by: tokens, total_tokens: 100, warmup_tokens: 101}", 1).what ==
        "schedule: warmup_tokens 101 is more than its total of 100 tokens");
  CHECK(ResolveRefusal(batch + "schedule: {by: tokens, type: inv_sqrt}", 1).Says("warmup_tokens is 0"));
}

TEST_CASE("A file that cannot be read is a wrong configuration") {
  CHECK(RefusalOf([] { RunConfig::Load(PosixFileSystem(), "no/such.yaml", {}); }).Says("no/such.yaml"));
}

TEST_CASE("Every file in configs is valid, alone and on two ranks") {
  FileSystem& fs = PosixFileSystem();
  int count = 0;
  for (const std::string& name : fs.List("configs")) {
    if (!name.ends_with(".yaml")) continue;
    CAPTURE(name);
    ++count;
    for (const int world : {1, 2}) {
      RunConfig config = RunConfig::Load(fs, JoinPath("configs", name), {});
      const bool sized = config.model.sizes.vocab_size > 0;
      CHECK_NOTHROW(config.Resolve(world, sized ? 0 : 4096));
      CHECK(config.model.sizes.NumParameters() > 0);
      CHECK_FALSE(config.data.train.empty());
    }
  }
  CHECK(count >= 4);
}

TEST_CASE("tinyshakespeare.yaml is nanoGPT's setting for a CPU") {
  RunConfig config = RunConfig::Load(PosixFileSystem(), "configs/tinyshakespeare.yaml", {});
  config.Resolve(1, 65);
  // nanoGPT prints 0.80M: without biases, and without the table of positions.
  CHECK(config.model.sizes.NumParameters() - 64 * 128 == 12 * 128 * 128 * 4 + (4 * 2 + 1) * 128 + 65 * 128);
  const Schedule schedule = config.MakeSchedule();
  CHECK(schedule.At(100) == Approx(2e-3));
  CHECK(schedule.At(2000) == Approx(2e-4));
  CHECK(config.train.global_batch_size == 12);
}

TEST_CASE("docs/configuration.md is what the description says") {
  INFO("bazel run //tools:configuration_reference > docs/configuration.md");
  CHECK(ReadFile(PosixFileSystem(), "docs/configuration.md") == ConfigurationReference());
}

// A valid text with a random fault of the kinds that editors and people make.
std::string Mutate(std::mt19937& random, std::string text) {
  static const std::string kPieces[] = {":",    "{", "}",     "[",  "]",    ",",        "-", "\n",   "\t",
                                        " ",    "'", "\"",    "#",  "&a ",  "*a",       "!", "? ",   "|\n",
                                        "null", "~", "1e999", "-1", "\xff", "\xe2\x82", "%", "---\n"};
  const auto place = [&] { return random() % (text.size() + 1); };
  for (size_t i = 0, n = 1 + random() % 2; i < n; ++i) {
    switch (random() % 4) {
      case 0:
        text.insert(place(), kPieces[random() % std::size(kPieces)]);
        break;
      case 1:
        text.erase(place(), random() % 6);
        break;
      case 2:
        text.insert(place(), text.substr(place(), random() % 40));
        break;
      default:
        if (!text.empty()) text[random() % text.size()] = static_cast<char>(random() % 256);
    }
  }
  return text;
}

TEST_CASE("A damaged file gives an error of its own kind, or a configuration that survives being written") {
  std::mt19937 random(7);
  int refused = 0, accepted = 0;
  for (int i = 0; i < 500; ++i) {
    // The file, or an override.
    const std::string text = i % 4 == 0 ? kEverything : Mutate(random, kEverything);
    const std::string override =
        i % 4 == 0 ? Mutate(random, "optimizer.betas=[0.5, 1e-3]") : "train.max_steps=500";
    CAPTURE(text, override);
    try {
      RunConfig config = Parse(text, {override});
      ++accepted;
      const std::string yaml = config.ToYaml();
      CHECK(Parse(yaml).ToYaml() == yaml);
      config.Resolve(2, 100);
    } catch (const ConfigError& error) {
      CHECK_FALSE(std::string(error.what()).empty());
      ++refused;
    }
  }
  CHECK(refused > 100);
  CHECK(accepted > 20);
}

TEST_CASE("A layout is checked against the ranks and the model, and data ranks share the batch") {
  const std::string yaml = "train: {global_batch_size: 24, micro_batch_size: 3}\n";
  RunConfig config = Parse(yaml + "parallel: {tensor: 2}");
  config.Resolve(8, 100);
  CHECK(config.train.gradient_accumulation_steps == 2);  // of four data-parallel ranks
  CHECK(ResolveRefusal("train: {global_batch_size: 9}\nparallel: {tensor: 2}", 8).what ==
        "train: global_batch_size 9 is no multiple of 4 data-parallel ranks");

  // All faults at once, each with its own hint.
  Refusal refusal = ResolveRefusal(yaml + "parallel: {tensor: 4}\ndata: {seq_len: 1000}", 6);
  CHECK(refusal.Says("parallel.tensor: 4 does not divide the 6 ranks of the job"));
  CHECK(refusal.Says("parallel.tensor: 4: num_heads 6 is no multiple of it"));
  CHECK(refusal.Says("seq_len 1000 is longer"));
  CHECK_THAT(refusal.hint, Catch::Contains("nearest valid: parallel.tensor: 3 or 6") &&
                               Catch::Contains("nearest valid: parallel.tensor: 3 or 6\n"));
  // Sizes that contradict each other are not asked further.
  CHECK(ResolveRefusal(yaml + "model: {hidden_size: 100}\nparallel: {tensor: 2}", 2)
            .Says("hidden_size 100 is no multiple of num_heads 6"));
  // A vocabulary that is not known yet is not in the way; one that is too small is.
  CHECK(ResolveRefusal(yaml + "parallel: {tensor: 6}", 6, 0).what.empty());
  CHECK(ResolveRefusal(yaml + "parallel: {tensor: 6}", 6, 4).Says("vocab_size 4 leaves a rank without rows"));
}

TEST_CASE("Ranks that share the tokens of a micro-batch share them equally") {
  const std::string yaml =
      "model: {max_seq_len: 5}\ntrain: {micro_batch_size: 3}\nparallel: {sequence_parallel: true, tensor: ";
  CHECK(ResolveRefusal(yaml + "1}", 2).what.empty());  // there is nothing to share
  CHECK(ResolveRefusal(yaml + "3}", 3).what.empty());
  const Refusal refusal = ResolveRefusal(yaml + "2}", 2);
  CHECK(refusal.Says("15 tokens of a micro-batch (micro_batch_size 3 × seq_len 5) over tensor 2"));
  CheckSuggestionsWork(yaml + "2}", 2, refusal);
}

}  // namespace
}  // namespace strata
