#include "tools/config.h"

#include <spdlog/fmt/fmt.h>

#include <memory>

#include "runtime/base/units.h"
#include "tools/data_efficiency_keys.h"
#include "tools/yaml_reader.h"

// The description of every section: name, variable, values, meaning, and what other programs call it
// (nanoGPT, Megatron-LM, DeepSpeed, transformers, llama2.c), from which misspelt and foreign keys are
// recognised.
namespace strata {
namespace {

constexpr int64_t kMany = 1'000'000'000'000'000;  // more steps or tokens than any run has

Codec<int64_t> Steps(int64_t at_least) { return Integer<int64_t>(at_least, kMany); }
// Small enough that a global batch is an int64_t.
Codec<int64_t> BatchSize() { return OrWord<int64_t>("auto", 0, Integer<int64_t>(1, 1'000'000)); }
Codec<std::string> OptionalText() { return OrWord<std::string>("null", "", Text()); }
Codec<std::vector<std::string>> Texts() { return ListOf(Text()); }
// Limits of sizes are those within which the number of parameters is an int64_t.
Codec<int64_t> Size(int64_t at_most) { return Integer<int64_t>(1, at_most); }
Codec<int64_t> SizeOrAuto(int64_t at_most) { return OrWord<int64_t>("auto", 0, Size(at_most)); }
constexpr Interval kPositive{.low = 0, .low_open = true};
constexpr Interval kNotNegative{.low = 0};
constexpr Interval kFraction{.low = 0, .high = 1, .high_open = true};

YamlSection RunKeys(RunSection& run) {
  return {
      "run",
      "What is run, and where its traces go.",
      {
          Bind("dir", run.dir, Text(), "Folder of everything the run leaves behind.",
               {"out_dir", "output_dir"}),
          Bind("seed", run.seed, Integer<uint64_t>(0), "Seed of weights, dropout and the order of samples."),
          Bind("resume", run.resume, OneOf<Resume>({{"never", Resume::kNever}, {"auto", Resume::kAuto}}),
               "`auto` continues from the latest checkpoint in `dir` where there is one. `--resume` on the "
               "command line takes precedence."),
      }};
}

// The family's settings go in first, then the preset's, then all other keys.
void BindModelKinds(ModelSection& model, std::vector<YamlKey>& keys) {
  auto type_given = std::make_shared<bool>(false);
  keys.push_back(Bind(
      "type", model.type,
      OneOf<ModelType>({{"gpt", ModelType::kGpt}, {"llama", ModelType::kLlama}, {"bert", ModelType::kBert}}),
      "The family; it sets the defaults of the keys below: `gpt` those shown, `llama` RMS norm, "
      "rotary positions, gated SiLU, no biases, an untied head, `bert` GELU by erf and two token types. "
      "Tokens of a `bert` see both ways, its norms follow the sums, and it learns to fill in tokens "
      "(`data.mask_rate`). Follows `preset` when left out.",
      {"architecture", "model_type"}));
  keys.back().stored = [&model, type_given] {
    model.sizes = TypeDefaults(model.type);
    *type_given = true;
  };
  keys.push_back(Bind("preset", model.preset, OptionalText(),
                      "A published model, which fills all sizes; keys given beside it change them. "
                      "The presets are listed below.",
                      {"name", "size"}));
  keys.back().stored = [&model, type_given] {
    if (model.preset.empty()) return;
    const ModelPreset* preset = FindModelPreset(model.preset);
    if (preset == nullptr) {
      std::vector<std::string> names;
      for (const ModelPreset& each : ModelPresets()) names.emplace_back(each.name);
      const std::string nearest = Nearest(model.preset, names);
      throw BadValue(fmt::format("no preset '{}'{}; the presets are {}", model.preset,
                                 nearest.empty() ? "" : fmt::format(" (did you mean '{}'?)", nearest),
                                 fmt::join(names, ", ")));
    }
    if (*type_given && preset->type != model.type) {
      throw BadValue(
          fmt::format("'{}' is not of the model.type that is given; leave model.type out", model.preset));
    }
    model.type = preset->type;
    model.sizes = preset->sizes;
  };
}

YamlSection ModelKeys(ModelSection& model) {
  TransformerConfig& c = model.sizes;
  YamlSection section{"model", "The model and its sizes.", {}};
  std::vector<YamlKey>& keys = section.keys;
  BindModelKinds(model, keys);
  const std::vector<YamlKey> sizes = {
      Bind("num_layers", c.num_layers, Size(10'000), "Transformer blocks.",
           {"n_layer", "n_layers", "num_hidden_layers"}),
      Bind("hidden_size", c.hidden_size, Size(1 << 20), "Width of the residual stream.",
           {"n_embd", "d_model", "dim"}),
      Bind("num_heads", c.num_heads, Size(4096), "Attention heads.",
           {"n_head", "n_heads", "num_attention_heads"}),
      Bind("num_kv_heads", c.num_kv_heads, SizeOrAuto(4096),
           "Heads of keys and values, each shared by `num_heads / num_kv_heads` heads. `auto`: `num_heads`.",
           {"n_kv_heads", "num_key_value_heads", "num_query_groups"}),
      Bind("head_dim", c.head_dim, SizeOrAuto(4096), "Width of a head. `auto`: `hidden_size / num_heads`.",
           {"kv_channels"}),
      Bind("ffn_hidden_size", c.ffn_hidden_size, SizeOrAuto(1 << 24),
           "Width inside the MLP. `auto`: 4 `hidden_size`; gated: 8/3 of it, rounded up to a multiple of 32.",
           {"intermediate_size", "hidden_dim", "n_inner", "d_ff"}),
      Bind("max_seq_len", c.max_seq_len, Size(1 << 24), "Longest sequence, in tokens.",
           {"block_size", "n_positions", "n_ctx", "context_length", "max_position_embeddings"}),
      Bind("vocab_size", c.vocab_size, SizeOrAuto(1 << 30),
           "`auto`: the tokenizer's. A larger one pads the tables."),
      Bind("num_token_types", c.num_token_types, Integer<int64_t>(0, 1024),
           "Kinds of tokens that have an embedding of their own; tokens of a run's texts are of the first.",
           {"type_vocab_size"}),
      Bind("tie_embeddings", c.tie_embeddings, Flag(), "The head shares the weights of the token embedding.",
           {"tie_word_embeddings", "share_embeddings"}),
      Bind("bias", c.bias, Flag(), "Linear layers and layer norms have biases.", {"add_bias_linear"}),
      Bind("positions", c.learned_positions, OneOf<bool>({{"learned", true}, {"rotary", false}}),
           "How positions enter: a learned table, or rotation of queries and keys.",
           {"position_embedding", "position_embedding_type"}),
      Bind("rope_theta", c.rope_theta, Number(kPositive), "Base of the rotary wavelengths.", {"rotary_base"}),
      Bind("norm", c.norm,
           OneOf<NormKind>({{"layer_norm", NormKind::kLayerNorm}, {"rms_norm", NormKind::kRmsNorm}}),
           "Normalisation, before each sublayer; `bert`: after.", {"normalization"}),
      Bind("norm_eps", c.norm_eps, Number(kPositive), "Added to the variance under the root.",
           {"layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps"}),
      Bind("activation", c.activation,
           OneOf<Activation>({{"gelu_tanh", Activation::kGeluTanh},
                              {"gelu_erf", Activation::kGeluErf},
                              {"silu", Activation::kSilu},
                              {"relu", Activation::kRelu}}),
           "Inside the MLP.", {"activation_function", "hidden_act"}),
      Bind("gated", c.gated, Flag(),
           "SwiGLU: the MLP multiplies by a second projection (with `activation: silu`).", {"swiglu"}),
      Bind("dropout", c.dropout, Number(kFraction),
           "Share dropped of embeddings and of what each sublayer adds.", {"hidden_dropout", "resid_pdrop"}),
      Bind("init_std", c.init_std, Number(kNotNegative),
           "Standard deviation of initial weights; those that add to the residual stream start smaller by "
           "√(2 `num_layers`).",
           {"initializer_range", "init_method_std"}),
  };
  keys.insert(keys.end(), sizes.begin(), sizes.end());
  keys.push_back(Bind("init_from", model.init_from, OptionalText(),
                      "A checkpoint, or a folder in a published layout, whose weights the run begins with.",
                      {"pretrained", "model_name_or_path"}));
  keys.push_back(
      Bind("freeze", model.freeze, Texts(),
           "Parameters whose names begin with one of these are not trained: `[embedding, blocks.0.]`."));
  return section;
}

YamlSection DataKeys(DataSection& data) {
  return {
      "data",
      "The texts. Paths are relative to where the command runs.",
      {
          Bind("train", data.train, Texts(),
               "Files to train on: text, which is tokenised once and kept in `run.dir`, or `.bin` token "
               "files. `shards/*.bin` stands for all that match.",
               {"train_files", "train_data", "data_path"}),
          Bind("mix", data.mix, ListOf(Number(kNotNegative)),
               "Share of each entry of `train` in every stretch of training, however long it is: `[0.5, 0.3, "
               "0.2]`. Empty: all samples alike.",
               {"data_weights", "blend", "data_mix", "weights"}),
          Bind("samples", data.packed, OneOf<bool>({{"windows", false}, {"documents", true}}),
               "`windows` of the text wherever they begin, or whole `documents`, several to a row, each "
               "attending to itself alone.",
               {"packing", "sample_packing", "reset_attention_mask"}),
          Bind("valid", data.valid, Texts(), "Files to measure the validation loss on.",
               {"valid_files", "validation", "eval"}),
          Bind("valid_split", data.valid_split, Number(kFraction),
               "Keeps the last part of each training file for validation instead of `valid`.", {"split"}),
          Bind("tokenizer", data.tokenizer, OptionalText(),
               "`gpt2:FOLDER`, `sentencepiece:FILE`, `wordpiece:FILE`, `hf:tokenizer.json`, `llama2c:FILE`, "
               "`char` or `byte`. `null`: the one that token files carry, or `byte`.",
               {"tokenizer_path", "tokenizer_model"}),
          Bind("seq_len", data.seq_len, SizeOrAuto(1 << 24),
               "Tokens of a sample. `auto`: `model.max_seq_len`.",
               {"seq_length", "sequence_length", "max_length"}),
          Bind(
              "mask_rate", data.mask_rate, Number({.low = 0, .high = 1, .low_open = true}),
              "Share of the tokens that a `bert` learns to fill in: of these eight in ten are masked, one in "
              "ten is a random token, one is left.",
              {"mlm_probability", "masked_lm_prob"}),
          Bind("mask_token", data.mask_token, OrWord<int64_t>("auto", -1, Integer<int64_t>(0, 1 << 30)),
               "The mask's id. `auto`: the tokenizer's `[MASK]` or `<mask>`, or one id more than it has.",
               {"mask_token_id"}),
      }};
}

YamlSection TrainKeys(TrainSection& train) {
  return {
      "train",
      "The course of training. `global_batch_size` = `micro_batch_size` × `gradient_accumulation_steps` × "
      "data-parallel ranks: give any two of the three, or one; what is not given is 1 or follows.",
      {
          Bind("global_batch_size", train.global_batch_size, BatchSize(), "Sequences a step, over all ranks.",
               {"train_batch_size", "batch_size"}),
          Bind("micro_batch_size", train.micro_batch_size, BatchSize(),
               "Sequences that a rank computes at once.",
               {"train_micro_batch_size_per_gpu", "per_device_train_batch_size"}),
          Bind("gradient_accumulation_steps", train.gradient_accumulation_steps, BatchSize(),
               "Micro-batches that a rank sums up before a step.",
               {"grad_accum_steps", "accumulation_steps"}),
          Bind("max_steps", train.max_steps, Steps(1), "Steps after which training ends.",
               {"max_iters", "train_iters", "num_steps", "steps"}),
          Bind("max_tokens", train.max_tokens, OrNull(Steps(1)),
               "Tokens after which training ends, if that is before `max_steps`.", {"train_tokens"}),
          Bind("precision", train.precision,
               OneOf<DType>({{"fp32", DType::kF32}, {"bf16", DType::kBF16}, {"fp16", DType::kF16}}),
               "Of weights and activations; masters and gradient sums are fp32. fp16 scales the loss.",
               {"dtype", "mixed_precision", "bf16", "fp16"}),
          Bind("clip_grad_norm", train.clip_grad_norm, Number(kNotNegative),
               "Longest global gradient; a longer one is shortened to this. 0: never.",
               {"gradient_clipping", "grad_clip", "max_grad_norm", "clip_grad"}),
          Bind("log_interval", train.log_interval, Steps(0),
               "Steps between two lines of the log. 0: the last only.", {"logging_steps", "steps_per_print"}),
          Bind("eval_interval", train.eval_interval, Steps(0),
               "Steps between two measurements of the validation loss. 0: the last only.", {"eval_steps"}),
          Bind("eval_batches", train.eval_batches, Steps(1), "Global batches of a measurement.",
               {"eval_iters"}),
      }};
}

YamlSection OptimizerKeys(OptimizerConfig& optimizer) {
  return {"optimizer",
          "The update rule. Norms, biases and embeddings do not decay.",
          {
              Bind("type", optimizer.type,
                   OneOf<OptimizerType>({{"adamw", OptimizerType::kAdamW},
                                         {"adam", OptimizerType::kAdam},
                                         {"sgd", OptimizerType::kSgd},
                                         {"lion", OptimizerType::kLion}}),
                   "`adam` adds the decay to the gradient, `adamw` takes it from the weights.", {"name"}),
              Bind("lr", optimizer.lr, Number(kNotNegative), "The learning rate's peak.",
                   {"learning_rate", "max_lr", "peak_lr"}),
              BindTo<std::vector<double>>(
                  "betas", ListOf(Number(kFraction), 2),
                  [&optimizer](const std::vector<double>& betas) {
                    optimizer.beta1 = betas[0];
                    optimizer.beta2 = betas[1];
                  },
                  [&optimizer] {
                    return std::vector<double>{optimizer.beta1, optimizer.beta2};
                  },
                  "Decay of the averages of the gradient and of its square (adam, adamw, lion).",
                  {"beta1", "beta2", "adam_beta1", "adam_beta2"}),
              Bind("eps", optimizer.eps, Number(kNotNegative),
                   "Added to the root of the second average (adam, adamw).",
                   {"epsilon", "adam_eps", "adam_epsilon"}),
              Bind("weight_decay", optimizer.weight_decay, Number(kNotNegative), "Decay of the weights."),
              Bind("momentum", optimizer.momentum, Number(kFraction), "Of sgd; 0: none."),
          }};
}

YamlSection ScheduleKeys(ScheduleSection& schedule) {
  return {
      "schedule",
      "The learning rate of each step. It rises linearly over `warmup_steps`, step 1 taking "
      "`lr / warmup_steps`, and then falls to `min_lr_ratio` of the peak at `total_steps`. With `by: tokens` "
      "or `layer_tokens` it follows what was consumed, and `warmup_tokens` and `total_tokens` take the place "
      "of these keys: where lengths, batches or kept tokens grow, a step is no measure.",
      {
          Bind("type", schedule.type,
               OneOf<ScheduleType>({{"constant", ScheduleType::kConstant},
                                    {"linear", ScheduleType::kLinear},
                                    {"cosine", ScheduleType::kCosine},
                                    {"inv_sqrt", ScheduleType::kInverseSqrt},
                                    {"wsd", ScheduleType::kWsd}}),
               "How it falls: not at all, in a line, as a cosine, as √(`warmup_steps` / step), or in a line "
               "from `decay_start` on.",
               {"lr_scheduler_type", "lr_decay_style"}),
          Bind("by", schedule.by,
               OneOf<ScheduleUnit>({{"steps", ScheduleUnit::kSteps},
                                    {"tokens", ScheduleUnit::kTokens},
                                    {"layer_tokens", ScheduleUnit::kLayerTokens}}),
               "What it counts. `layer_tokens`: the mean over layers of the tokens that each computed, fewer "
               "than `tokens` under `data.random_ltd`.",
               {"lr_decay_token", "use_lr_by_tokens"}),
          Bind("warmup_steps", schedule.warmup_steps, Steps(0), "Steps of the rise.",
               {"warmup_iters", "lr_warmup_iters", "warmup_num_steps"}),
          Bind("warmup_tokens", schedule.warmup_tokens, Steps(0), "Tokens of the rise.",
               {"lr_warmup_tokens"}),
          Bind("min_lr_ratio", schedule.min_lr_ratio, Number({.low = 0, .high = 1}),
               "The last rate, as a part of the peak (linear, cosine, wsd).", {"min_lr"}),
          Bind("total_steps", schedule.total_steps, OrNull(Steps(1)),
               "Where the fall ends. `null`: where training does.", {"lr_decay_iters", "lr_decay_steps"}),
          Bind("total_tokens", schedule.total_tokens, OrNull(Steps(1)),
               "The same in tokens. `null`: `train.max_tokens`.", {"lr_decay_tokens"}),
          Bind("decay_start", schedule.decay_start, OrWord<int64_t>("auto", 0, Steps(1)),
               "Last step, or token, at the peak (wsd). `auto`: after nine tenths of the total."),
      }};
}

YamlSection ParallelKeys(ParallelSection& parallel) {
  return {
      "parallel",
      "How ranks share the work and talk to each other.",
      {
          Bind("tensor", parallel.tensor, Integer<int64_t>(1, 1024),
               "Ranks that share each layer; the others are data-parallel. Divides `model.num_heads` and "
               "`model.ffn_hidden_size`.",
               {"tensor_parallel_size", "tensor_model_parallel_size", "tp"}),
          Bind("sequence_parallel", parallel.sequence_parallel, Flag(),
               "These ranks share the tokens of a micro-batch where layers are not shared, too: fewer "
               "activations at the same traffic. `tensor` divides `micro_batch_size` × `seq_len`."),
          Bind("expert", parallel.expert, Integer<int64_t>(1, 65536),
               "Data-parallel ranks that share the experts of a mixture out among them.",
               {"expert_parallel_size", "expert_model_parallel_size", "ep"}),
          Bind("backend", parallel.backend,
               OneOf<Backend>({{"auto", Backend::kAuto},
                               {"mpi", Backend::kMpi},
                               {"nccl", Backend::kAuto,
                                "ranks on GPUs use NCCL by themselves where it is; leave this out"},
                               {"threads", Backend::kThreads}}),
               "`threads`: ranks are threads of one process. `auto`: MPI under mpirun, else a single rank.",
               {"distributed_backend"}),
          Bind("ranks", parallel.ranks, Integer<int64_t>(1, 1024),
               "How many with `backend: threads`; mpirun decides otherwise.", {"world_size", "num_ranks"}),
          Bind("timeout_s", parallel.timeout_s, Number(kPositive),
               "Seconds after which a collective that some rank has not joined ends the job.", {"timeout"}),
      }};
}

YamlSection ZeroKeys(ZeroOptions& zero) {
  return {
      "zero",
      "What is partitioned over the data-parallel ranks (ZeRO), and how it travels. At equal `reduce` and "
      "`reduce_dtype` every stage trains the same bits; all other keys change time and memory only.",
      {
          Bind("stage", zero.stage, Integer(0, 3),
               "0: nothing; 1: optimiser state; 2: and gradients; 3: and parameters.", {"zero_stage"}),
          Bind("reduce", zero.reduce,
               OneOf<ZeroOptions::Reduce>({{"auto", ZeroOptions::Reduce::kAuto},
                                           {"step", ZeroOptions::Reduce::kStep},
                                           {"micro_batch", ZeroOptions::Reduce::kMicroBatch}}),
               "When gradients of several micro-batches meet: once a step, or after each. `auto`: `step` at "
               "stages 0 and 1, `micro_batch` at 2 and 3."),
          Bind("reduce_dtype", zero.reduce_dtype,
               OneOf<DType>({{"fp32", DType::kF32}, {"bf16", DType::kBF16}}),
               "What gradients are sent in; their sums are fp32.", {"communication_data_type"}),
          Bind("overlap", zero.overlap, Flag(), "Communicates beside the computation.", {"overlap_comm"}),
          Bind("bucket_bytes", zero.bucket_bytes, Bytes(),
               "Whole gradients that may be under way to their reduction, or to where they rest; beyond them "
               "backward waits.",
               {"reduce_bucket_size", "allgather_bucket_size"}),
          Bind("prefetch_bytes", zero.prefetch_bytes, Bytes(0),
               "Parameters that are brought ahead of the unit in use (stage 3, and `offload.parameters`).",
               {"stage3_prefetch_bucket_size", "prefetch_bucket_size"}),
          Bind("persistence_threshold", zero.persistence_threshold, Steps(0),
               "Parameters of fewer elements stay on every rank.",
               {"stage3_param_persistence_threshold", "param_persistence_threshold"}),
          Bind("max_live_bytes", zero.max_live_bytes, OrWord<int64_t>("null", INT64_MAX, Bytes()),
               "Nothing more is brought ahead while this much of parameters is there. `null`: no bound.",
               {"stage3_max_live_parameters", "max_live_parameters"}),
      },
      {"zero_optimization"}};
}

Codec<Tier> Resting() {
  return OneOf<Tier>({{"none", Tier::kDevice},
                      {"host", Tier::kHost},
                      {"nvme", Tier::kNvme},
                      {"cpu", Tier::kHost, "the host's memory is called host"}});
}

YamlSection OffloadKeys(OffloadOptions& offload) {
  return {"zero.offload",
          "Where state rests that is not in use: on the device (`none`), in the host's memory, or in a file "
          "of each rank on an NVMe disk. Any combination goes with any stage, and changes no bit.",
          {
              Bind("optimizer", offload.optimizer, Resting(),
                   "Master weights and optimiser state. They are updated by the host.",
                   {"offload_optimizer", "cpu_offload", "offload_optimizer_device"}),
              Bind("parameters", offload.parameters, Resting(),
                   "Weights in the precision of training; brought when their unit is entered.",
                   {"offload_param", "offload_params", "cpu_offload_params", "offload_param_device"}),
              Bind("gradients", offload.gradients, Resting(),
                   "Sums of gradients between backward and the update.", {"offload_gradients"}),
              Bind("ratio", offload.ratio, Number({.low = 0, .high = 1}),
                   "Share of the optimiser's state that leaves the device; that of the model's first units "
                   "stays."),
          }};
}

YamlSection NvmeKeys(OffloadOptions& offload) {
  return {"zero.offload.nvme",
          "The files on disk: a rank's is reserved when the run begins and is gone when it ends, however it "
          "ends. Reads of the next sub-groups and writes of the last ones run beside the update of one.",
          {
              Bind("path", offload.path, OrWord<std::string>("null", "", Text()),
                   "Folder on a local disk; jobs may share it.", {"nvme_path"}),
              Bind("sub_group_bytes", offload.sub_group_bytes, Bytes(),
                   "State that is read, updated and written at a time.", {"sub_group_size"}),
              Bind("buffers", offload.buffers, Integer<int64_t>(1, 1024),
                   "Sub-groups in memory at a time; 3 let reads, update and writes overlap.",
                   {"buffer_count", "pipeline_read", "pipeline_write"}),
              Bind("block_bytes", offload.block_bytes, Bytes(4096, 4096), "One request to the disk.",
                   {"block_size"}),
              Bind("queue_depth", offload.queue_depth, Integer<int64_t>(1, 1024),
                   "Requests that the disk has at a time.", {"aio_queue_depth"}),
          },
          {"aio"}};
}

YamlSection RecomputeKeys(RecomputeSection& recompute) {
  return {
      "recompute",
      "Activations that are computed again in backward instead of kept.",
      {
          Bind("policy", recompute.policy,
               OneOf<RecomputePolicy>({{"none", RecomputePolicy::kNone},
                                       {"full", RecomputePolicy::kFull},
                                       {"selective", RecomputePolicy::kSelective}}),
               "Of each block: nothing, everything, or what is large and cheap.",
               {"recompute_granularity", "gradient_checkpointing", "activation_checkpointing"}),
          Bind("offload", recompute.offload, Resting(),
               "Where each block's input, all that `policy: full` keeps of it, waits for backward: on the "
               "device (`none`), in the host's memory, or in a file of each rank under "
               "`zero.offload.nvme.path`. Changes no bit.",
               {"cpu_checkpointing", "activation_offload", "cpu_offloading"}),
          Bind("stash_collectives", recompute.stash_collectives, Flag(),
               "Keeps what collectives gave, so that computing again communicates nothing."),
      }};
}

YamlSection CheckpointKeys(CheckpointSection& checkpoint) {
  return {"checkpoint",
          "What is saved of a run.",
          {
              Bind("interval", checkpoint.interval, OrWord<int64_t>("never", -1, Steps(0)),
                   "Steps between two checkpoints. 0: at the end only. `never`: for trials.",
                   {"save_interval", "save_steps"}),
              Bind("keep", checkpoint.keep, Steps(1), "Checkpoints that stay; older ones are removed.",
                   {"save_total_limit"}),
              Bind("async", checkpoint.async, Flag(), "Writes beside the next step's computation.",
                   {"async_save"}),
          }};
}

YamlSection DeviceKeys(DeviceSection& device) {
  return {
      "device",
      "What computes.",
      {
          Bind("type", device.type,
               OneOf<DeviceChoice>({{"auto", DeviceChoice::kAuto},
                                    {"cpu", DeviceChoice::kCpu},
                                    {"cuda", DeviceChoice::kCuda}}),
               "`auto`: a GPU where this machine and this build have one, each rank its own; else the CPU."),
          Bind("attention", device.attention,
               OneOf<AttentionChoice>(
                   {{"strata", AttentionChoice::kStrata}, {"cudnn", AttentionChoice::kCudnn}}),
               "Whose attention a GPU runs. `cudnn`: NVIDIA's cuDNN, for the shapes that it takes; its bits "
               "are "
               "others than strata's."),
          Bind("threads", device.threads, SizeOrAuto(4096),
               "Threads of a rank. `auto`: this machine's cores / its ranks.", {"num_threads"}),
          Bind("memory_limit", device.memory_limit, OrNull(Bytes()),
               "Bytes that a rank's tensors may take; beyond them the run ends with a table of what took "
               "them."),
      }};
}

// A number for all layers, a list of one for each, or null.
Codec<std::vector<int64_t>> Experts() {
  const Codec<int64_t> one = Integer<int64_t>(1, 1 << 20);
  const Codec<std::vector<int64_t>> list = ListOf(one);
  return {"null, " + one.type + " or " + list.type,
          [one, list](const YAML::Node& node) -> std::optional<std::vector<int64_t>> {
            if (internal::IsWord(node, "null")) return std::vector<int64_t>{};
            if (const auto number = one.read(node)) return std::vector{*number};
            return list.read(node);
          },
          [one, list](const std::vector<int64_t>& values) {
            return values.empty() ? "null" : values.size() == 1 ? one.write(values[0]) : list.write(values);
          }};
}

YamlSection MoeKeys(MoeConfig& moe) {
  using Config = MoeConfig;
  return {
      "moe",
      "Mixtures of experts in place of some blocks' MLPs. Without `num_experts` the model is dense.",
      {
          Bind("num_experts", moe.num_experts, Experts(),
               "Experts of a layer: a number, or a list with one for each mixture layer (a pyramid).",
               {"num_local_experts", "n_experts"}),
          Bind("top_k", moe.top_k, Integer<int64_t>(1, 1024), "Experts that a token goes to.",
               {"k", "num_experts_per_tok", "moe_router_topk"}),
          Bind("capacity_factor", moe.capacity_factor, Number(kPositive),
               "An expert takes at most tokens / experts × `top_k` × this of a micro-batch; what finds no "
               "place passes the layer by.",
               {"train_capacity_factor"}),
          Bind("eval_capacity_factor", moe.eval_capacity_factor, Number(kPositive),
               "The same in evaluation."),
          Bind("min_capacity", moe.min_capacity, Integer<int64_t>(1, 1 << 30),
               "Never fewer places than these."),
          Bind("drop_tokens", moe.drop_tokens, Flag(), "Whether there is a capacity."),
          Bind("expert_interval", moe.expert_interval, Integer<int64_t>(1, 10'000),
               "Every n-th block has a mixture.", {"expert_layer_frequency", "moe_layer_freq"}),
          Bind("residual", moe.residual, Flag(),
               "PR-MoE: a dense MLP beside the experts, mixed by a learned softmax of two.",
               {"use_residual", "mlp_type"}),
          Bind(
              "noisy_gate", moe.noisy_gate,
              OneOf<Config::NoisyGate>({{"none", Config::NoisyGate::kNone},
                                        {"jitter", Config::NoisyGate::kJitter},
                                        {"rsample", Config::NoisyGate::kRsample}}),
              "In training. `jitter`: the router's input times U(0.99, 1.01). `rsample`: choices by logits + "
              "Gumbel noise (`top_k` 1).",
              {"noisy_gate_policy"}),
          Bind("sample_second_choice", moe.sample_second_choice, Flag(),
               "In training with `top_k` 2: the second choice by logits + Gumbel noise (GShard)."),
          Bind("random_token_selection", moe.random_token_selection, Flag(),
               "With `top_k` 1: a full expert takes random tokens instead of the first.", {"use_rts"}),
          Bind("aux_loss_coefficient", moe.aux_loss_coefficient, Number(kNotNegative),
               "Weight of the loss that balances the experts.",
               {"moe_loss_coeff", "router_aux_loss_coef", "moe_aux_loss_coeff"}),
          Bind("z_loss_coefficient", moe.z_loss_coefficient, Number(kNotNegative),
               "Weight of the router's z-loss.", {"moe_z_loss_coeff"}),
          Bind("dispatch", moe.dispatch,
               OneOf<Config::Dispatch>(
                   {{"capacity", Config::Dispatch::kCapacity}, {"dropless", Config::Dispatch::kDropless}}),
               "`dropless`: every expert takes all its tokens."),
          Bind("aux_loss", moe.aux_loss,
               OneOf<Config::AuxLoss>(
                   {{"layers", Config::AuxLoss::kLayers}, {"pooled", Config::AuxLoss::kPooled}}),
               "Means over each layer's tokens, or over those of all layers together (Mixtral)."),
          Bind("drop_duplicates", moe.drop_duplicates, Flag(),
               "Tensor-parallel ranks hold the same tokens: each sends a share of them. Changes no bit."),
          Bind("expert_tensor_parallel", moe.expert_tensor_parallel, Flag(),
               "Experts are cut over the tensor-parallel ranks too.", {"enable_expert_tensor_parallelism"}),
      }};
}

std::vector<YamlSection> DescribeSections(RunConfig& config) {
  std::vector<YamlSection> sections = DataEfficiencyKeys(config.data);
  sections.insert(sections.begin(), {RunKeys(config.run), ModelKeys(config.model),
                                     MoeKeys(config.model.sizes.moe), DataKeys(config.data)});
  sections.insert(sections.end(),
                  {TrainKeys(config.train), OptimizerKeys(config.optimizer), ScheduleKeys(config.schedule),
                   ParallelKeys(config.parallel), ZeroKeys(config.zero), OffloadKeys(config.zero.offload),
                   NvmeKeys(config.zero.offload), RecomputeKeys(config.recompute),
                   CheckpointKeys(config.checkpoint), DeviceKeys(config.device)});
  return sections;
}

}  // namespace

RunConfig RunConfig::Load(FileSystem& fs, const std::string& path,
                          const std::vector<std::string>& overrides) {
  std::string text;
  try {
    text = ReadFile(fs, path);
  } catch (const IoError& error) {
    throw ConfigError(error.what(), "give the path of a configuration, configs/quickstart.yaml say");
  }
  return Parse(text, path, overrides);
}

RunConfig RunConfig::Parse(const std::string& yaml, const std::string& name,
                           const std::vector<std::string>& overrides) {
  RunConfig config;
  ReadYaml(DescribeSections(config), yaml, name, overrides);
  return config;
}

std::string RunConfig::ToYaml() const {
  RunConfig copy = *this;
  return WriteYaml(DescribeSections(copy));
}

std::string ConfigurationReference() {
  RunConfig defaults;
  std::string text =
      "# Configuration\n\n"
      "A run is described by one YAML file of the sections below; all keys have defaults. "
      "`section.key=value` "
      "on the command line stands in place of a key of the file: `optimizer.lr=1e-4`, `data.train=[a.txt, "
      "b.txt]`, `zero.offload.optimizer=host`. A section whose name has a dot, `zero.offload`, stands inside "
      "another. "
      "Unknown and repeated keys, wrong types and values out of range are refused, all at once, with their "
      "places. Every run writes its whole configuration to `config.resolved.yaml` in its folder.\n\n"
      "This page is made by `bazel run //tools:configuration_reference > docs/configuration.md`.\n" +
      YamlReference(DescribeSections(defaults)) +
      "\n## Presets of `model.preset`\n\n| preset | type | layers | width | heads | length | vocabulary | "
      "parameters | "
      "source |\n|-|-|-|-|-|-|-|-|-|\n";
  for (const ModelPreset& preset : ModelPresets()) {
    TransformerConfig c = preset.sizes;
    const bool sized = c.vocab_size > 0;
    if (sized) c.Resolve();
    text += fmt::format("| `{}` | {} | {} | {} | {} | {} | {} | {} | {} |\n", preset.name, Name(preset.type),
                        c.num_layers, c.hidden_size, c.num_heads, c.max_seq_len,
                        sized ? fmt::format("{}", c.vocab_size) : "the tokenizer's",
                        sized ? FormatCount(static_cast<double>(c.NumParameters())) : "", preset.source);
  }
  return text;
}

CurriculumOptions CurriculumSection::Options() const {
  CurriculumOptions options;
  for (const auto* criterion : {&seqlen, &vocab_rarity, &total_rarity, &loss, &own}) {
    if (criterion->by_value || criterion->pacing.active()) options.criteria.push_back(*criterion);
  }
  options.length = length;
  options.reshape = reshape;
  options.batch_size = batch_size;
  return options;
}

void ModelSection::Freeze(Model& model) const {
  for (Parameter* parameter : model.Parameters()) {
    for (const std::string& prefix : freeze) {
      if (parameter->name.starts_with(prefix)) parameter->requires_grad = false;
    }
  }
}

}  // namespace strata
