#include "driver/train_setup.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "data/chat_template.h"
#include "data/mixture.h"
#include "driver/fp8_state.h"
#include "driver/inference.h"
#include "infer/prompts.h"
#include "model.h"
#include "models/family.h"
#include "runtime/files/files.h"
#include "runtime/files/log.h"
#include "runtime/rng.h"

using nlohmann::json;

namespace {

// What a run does that does not say otherwise. Pretrained weights want small steps and few of them: with the rates of a
// run from scratch they forget more than the new text teaches.
struct Defaults {
    double lr, adapters_lr;               // AdamW's
    int64_t steps;                        // 0: epochs
    double epochs, warmup, weight_decay;  // warmup: a fraction of the steps
};
constexpr Defaults FROM_SCRATCH = {6e-4, 2e-4, 1000, 0, 0.05, 0.1}, FROM_CHECKPOINT = {2e-5, 2e-4, 0, 3, 0.03, 0},
                   ON_PAIRS = {1e-6, 1e-5, 0, 1, 0.1, 0}, ON_ROLLOUTS = {1e-6, 1e-5, 200, 0, 0, 0};
// The rates from a checkpoint were measured over 57 steps (docs/log/finetuning.md); in far fewer they teach nothing.
constexpr int64_t ENOUGH_STEPS = 50, FEW_STEPS = 20;

Mixture mixture_of(const std::vector<TrainingData>& data) {
    std::vector<int64_t> weights;
    for (const TrainingData& d : data) weights.push_back(d.weight);
    return Mixture(weights);
}

// Sets `key = value` in the text of run.toml, in place of the line that is there.
void set_toml(std::string& toml, const std::string& key, const std::string& value) {
    size_t begin = 0;
    while (begin < toml.size() && toml.compare(begin, key.size() + 1, key + "=") != 0) {
        const size_t end = toml.find('\n', begin);
        begin = end == std::string::npos ? toml.size() : end + 1;
    }
    size_t end = toml.find('\n', begin);
    end = end == std::string::npos ? toml.size() : end + 1;
    toml.replace(begin, end - begin, key + "=" + value + "\n");
}

const Defaults& defaults_of(const TrainSetup& s) {
    if (s.o.rollout.on()) return ON_ROLLOUTS;
    return s.source.directory.empty() ? FROM_SCRATCH : s.o.preference.on() ? ON_PAIRS : FROM_CHECKPOINT;
}

}  // namespace

LearningRates learning_rates(const TrainOptions& o) {
    const double lr = o.lr.value_or(FROM_SCRATCH.lr);
    return {lr, o.embedding_lr.value_or(lr), o.head_lr.value_or(lr), o.vector_lr.value_or(lr)};
}

OptimizerOptions optimizer_options(const TrainOptions& o) {
    OptimizerOptions options;
    static_cast<ElementwiseOptions&>(options) = o.elementwise;
    options.adamw.seed = o.seed;
    const LearningRates rates = learning_rates(o);
    for (size_t g = 0; g < NUM_RATE_GROUPS; g++) {
        const double all = o.weight_decay.value_or(0), decay = g ? o.muon.adam_weight_decay.value_or(all) : all;
        options.rates[g] = {float(rates[0] > 0 ? rates[g] / rates[0] : 1), float(decay)};
    }
    options.muon.newton_schulz =
        newton_schulz_coefficients(o.muon.coefficients_or_default(), int(o.muon.iterations.value_or(0)));
    options.muon.scale = o.muon.rms_scale() ? MuonScale::RMS : MuonScale::Spectral;
    options.muon.seed = o.seed;
    return options;
}

double momentum(const TrainOptions& o, int64_t step) {
    const double full = o.muon.momentum_or_default(), first = std::min(0.85, full);
    const double warmup = double(o.muon.momentum_warmup.value_or(0));
    return double(step) < warmup ? first + (full - first) * double(step) / warmup : full;
}

double learning_rate(const TrainOptions& o, int64_t step) {
    const double lr = learning_rates(o)[size_t(RateGroup::HiddenMatrices)];
    if (step < o.warmup) return lr * double(step + 1) / double(o.warmup);
    const double last = double(std::max<int64_t>(o.steps - 1 - o.warmup, 1));
    const double progress = std::min(1.0, double(step - o.warmup) / last);  // 0 after the warmup, 1 at the last step
    const double low = o.final_lr;
    switch (o.schedule) {
        case Schedule::Constant:
            return lr;
        case Schedule::Linear:
            return lr * (1 - progress * (1 - low));
        case Schedule::Cosine:
            return lr * (low + (1 - low) * 0.5 * (1 + std::cos(M_PI * progress)));
        case Schedule::WSD: {
            const double decayed = o.decay_fraction > 0 ? std::max(0.0, (progress - 1) / o.decay_fraction + 1) : 0;
            return lr * (1 - decayed * (1 - low));
        }
    }
    return lr;
}

bool TrainSetup::evaluates() const {
    return !questions.empty() ||
           std::any_of(data.begin(), data.end(), [](const TrainingData& d) { return d.val_files != nullptr; });
}

const DataDirectory& TrainSetup::tokenizer_data() const {
    static const DataDirectory none;
    return data.empty() ? none : data.front().directory;
}

std::unique_ptr<Tokenizer> TrainSetup::tokenizer() const {
    if (rollout) return std::make_unique<Tokenizer>(source.files);
    const std::string path = tokenizer_data().tokenizer_path();
    return path.empty() ? nullptr : std::make_unique<Tokenizer>(path);
}

bool TrainSetup::packs() const {
    return rollout ||
           std::any_of(data.begin(), data.end(), [](const TrainingData& d) { return d.train_packing != nullptr; });
}

LoraBase TrainSetup::lora_base() const {
    return o.random_weights ? LoraBase{source.name, o.seed} : LoraBase{source.directory};
}

std::vector<TrainingSource> TrainSetup::sources() const {
    std::vector<TrainingSource> all;
    for (const TrainingData& d : data) all.emplace_back(d.train_files, d.train_packing.get(), d.weight);
    return all;
}

void check_grad_rounding(const RunOptions& o, int64_t world, Device device) {
    if (o.grad_rounding == "stochastic") return;
    if (o.grad_dtype != "bf16")
        throw UsageError("--grad-rounding nearest: gradients in fp32 are not rounded; add --grad-dtype bf16");
    if (Sharding{o.sharding.zero_stage, 0, world}.splits_gradients())
        throw UsageError(str("--grad-rounding nearest: in --zero-stage ", o.sharding.zero_stage, " the ", world,
                             " ranks add up the gradients of each micro-step outside the matmuls; leave it out or take "
                             "--zero-stage 1"));
    if (device == Device::CUDA && o.model.type() != DType::BF16)
        throw UsageError(str("--grad-rounding nearest: a GPU adds to sums in bf16 only in matmuls of bf16, not of ",
                             o.model.dtype, "; add --dtype bf16"));
}

void check_same_tokenizer(const DataDirectory& data, const ModelSource& source) {
    if (source.directory.empty()) return;
    const std::string theirs = data.tokenizer_path();
    const std::string remedy =
        source.gguf ? str("convert that file to a directory and make the data with the directory as TOKENIZER")
                    : str("make the data with TOKENIZER=", source.directory);
    const auto same = [&] {  // a GGUF file holds the tokens of a tokenizer.json, not its text
        return source.gguf ? Tokenizer(source.files).has_tokens_of(Tokenizer(theirs))
                           : Tokenizer::same(source.files, theirs);
    };
    require(theirs.empty() || !Tokenizer::exists(source.files) || same(), data.path,
            " was made with another tokenizer than that of ", source.directory, "; ", remedy);
    require(data.vocab_size <= source.config.vocab_size, data.path, " has a vocabulary of ", data.vocab_size,
            " tokens, but ", source.directory, " has one of ", source.config.vocab_size,
            "; make the data with the model's tokenizer, whose files may declare no token beyond the model's");
}

std::string hash_of(const std::string& text) {
    char hash[17];
    std::snprintf(hash, sizeof hash, "%016" PRIx64, name_hash(text));
    return hash;
}

std::string fingerprint(const TokenFiles& files) {
    std::string sample = std::to_string(files.size());
    const int64_t n = std::min<int64_t>(files.size(), 1 << 16);
    std::vector<int32_t> tokens(static_cast<size_t>(n));
    for (const int64_t begin : {int64_t(0), (files.size() - n) / 2, files.size() - n}) {
        files.read(begin, n, tokens.data(), 0);
        sample.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(int32_t));
        if (!files.masked()) continue;
        std::vector<uint8_t> mask(tokens.size());
        files.read_mask(begin, n, mask.data());
        sample.append(mask.begin(), mask.end());
    }
    return hash_of(sample);
}

namespace {

// Of several directories the hashes with their shares: "0123456789abcdef:7,fedcba9876543210:3".
std::string fingerprint(const std::vector<TrainingData>& data, const Mixture& mixture) {
    if (data.size() == 1) return fingerprint(data[0].train_files);
    std::string all;
    for (size_t k = 0; k < data.size(); k++)
        all += str(k ? "," : "", fingerprint(data[k].train_files), ":", mixture.share(k));
    return all;
}

// Opens the directories of --data. All must have one tokenizer.
std::vector<TrainingData> open_training_data(const std::string& option) {
    std::vector<TrainingData> all;
    for (const DataShare& share : parse_data_shares("--data", option)) {
        DataDirectory directory = open_data(share.path);
        TokenFiles train_files = open_split(directory, true);
        all.push_back({std::move(directory), share.weight, std::move(train_files)});
        TrainingData& data = all.back();
        if (!glob_files(data.directory.val_pattern()).empty())
            data.val_files = std::make_unique<TokenFiles>(open_split(data.directory, false));
        const DataDirectory &first = all[0].directory, &own = data.directory;
        const bool ours = Tokenizer::exists(first.path), theirs = Tokenizer::exists(own.path);
        const bool same_file = ours == theirs && (!ours || Tokenizer::same(first.path, own.tokenizer_path()));
        require(same_file && first.vocab_size == own.vocab_size && first.end_of_text == own.end_of_text,
                "--data: ", own.path, " was made with another tokenizer than ", first.path,
                "; make one of them again with TOKENIZER=", first.path);
    }
    return all;
}

// The nearest multiples of a micro-step's tokens, for the remedy in an error message.
std::string nearest_multiples(int64_t wanted, int64_t unit) {
    const int64_t below = wanted / unit * unit;
    return below ? str(below, " or ", below + unit) : str(unit);
}

// The options of a resumed run that must be those of its checkpoint.
void check_unchanged(TrainSetup& s) {
    const ResumePoint& r = s.resume;
    if (!s.o.total_batch_tokens) s.o.total_batch_tokens = r.total_batch_tokens;
    const auto same = [&](const char* what, const auto& stored, const auto& now) {
        require(stored == now, "--resume: ", what, " was ", stored, " when ", r.checkpoint,
                " was written and cannot change; start a new run in another --out");
    };
    same("the LoRA adapters: --lora-rank, --lora-alpha, --lora-targets, --rslora or --qlora", r.lora,
         s.o.lora.description());
    same("--loss or one of its options", r.preference, s.o.preference.description());
    same("--optimizer", r.optimizer, std::string(facts_of(s.o.optimizer).name));
    same("--seed", r.seed, int64_t(s.o.seed));
    same("what the run samples: --prompts, --completions, --max-tokens or another option of rollouts", r.rollout,
         s.o.rollout.description());
    if (!s.rollout) {
        same("--seq-len", r.seq_len, s.o.seq_len);
        same("--total-batch-tokens", r.total_batch_tokens, s.o.total_batch_tokens);
    }
    const std::string& last = r.data.back().fingerprint;
    if (s.o.new_data.empty()) {
        require(last == s.data_use.fingerprint, "--resume: ", s.o.data, " is not the data that ", r.checkpoint,
                " was trained with (fingerprint ", s.data_use.fingerprint, ", it was ", last,
                "); restore it, or go on with other data by --new-data");
        if (!s.rollout) same("--pack", r.pack, s.o.pack);
    } else {
        require(last != s.data_use.fingerprint, "--new-data: ", s.o.data, " is the data that ", r.checkpoint,
                " was trained with; leave the option out");
        if (!s.o.lora.on()) check_same_tokenizer(s.tokenizer_data(), find_model(r.checkpoint));
    }
    if (s.o.lora.on()) return;  // the checkpoint holds adapters alone; the base is recognised by its fingerprint
    same("the model's shape", config_to_json(find_model(r.checkpoint).config, json::object()),
         config_to_json(s.source.config, json::object()));
}

// The base of adapters: a checkpoint records its path.
void check_lora(const LoraOptions& lora, bool random_weights, const ModelSource& source) {
    if (!lora.on()) return;
    require(!random_weights || source.directory.empty(), "--random-weights: ", source.name,
            " has weights of its own; name a preset as --model, or leave the option out");
    require(random_weights || !source.directory.empty(), "--lora-rank: ", source.name,
            " is a preset without weights; name a model directory as --model, or add --random-weights to measure "
            "speed and memory");
    require(source.adapter.empty(), "--lora-rank: ", source.name,
            " is an adapter itself; write a model with it by 'train_gpt convert ", source.name,
            " DIR --merge' and name that");
}

// Pairs need a loss on pairs, and the reverse.
void check_pairs(const TrainOptions& o, const ModelSource& source, const std::vector<TrainingData>& all) {
    for (const TrainingData& data : all) {
        const bool pairs = data.train_files.has_pairs();
        require(!pairs || o.preference.on(), data.directory.path,
                " holds preference pairs, which need a loss on pairs; add --loss dpo (ipo, simpo, orpo)");
        require(
            pairs || !o.preference.on(), "--loss ",
            o.preference.description().substr(0, o.preference.description().find(',')), ": ", data.directory.path,
            " holds no preference pairs; make data from rows with prompt, chosen and rejected, or leave --loss out");
        require(!data.val_files || data.val_files->has_pairs() == pairs, data.directory.path,
                ": one of its splits holds preference pairs and the other none; make the data again");
    }
    if (!o.preference.on()) return;
    require(!source.directory.empty(), "--loss: ", source.name,
            " is a preset without weights; name a model that writes responses already");
    require(o.pack != "none", "--pack none: both responses of a pair are read whole; leave the option out");
}

// Muon's spectral updates have singular values of about 1, whatever the matrix, and take a larger rate than AdamW.
// AdamW moves each weight by about its rate, so embeddings that start with a standard deviation of 1 take a larger one
// than those that start with 0.02. All four are the best of a sweep (docs/understand/learning.md). Adapters, which all
// are hidden matrices, learn better with a smaller rate (docs/use/finetuning.md). From a checkpoint all are smaller by
// the factor of AdamW's, which is not measured.
LearningRates default_rates(const TrainSetup& s) {
    const Defaults& d = defaults_of(s);
    const double adamw = s.o.lora.on() ? d.adapters_lr : d.lr, factor = d.lr / FROM_SCRATCH.lr;
    switch (s.o.optimizer) {
        case OptimizerType::AdamW:
            break;
        case OptimizerType::Muon:
            if (s.o.muon.rms_scale()) break;
            return {s.o.lora.on() ? 5e-3 * d.adapters_lr / FROM_CHECKPOINT.adapters_lr : 0.02 * factor,
                    factor * (s.source.config.init == Init::FanIn ? 0.1 : 5e-3), 5e-3 * factor, 1e-2 * factor};
    }
    return {adamw, adamw, adamw, adamw};
}

// The peak rates by their options: --lr, and those that differ from it.
std::vector<std::pair<std::string, double>> named_rates(const TrainSetup& s) {
    const LearningRates rates = learning_rates(s.o);
    const char* const names[] = {"lr", "embedding-lr", "head-lr", "vector-lr"};
    std::vector<std::pair<std::string, double>> named;
    for (size_t g = 0; g < NUM_RATE_GROUPS; g++) {
        const bool is_head = RateGroup(g) == RateGroup::Head;
        if (g == 0 || (rates[g] != rates[0] && !(is_head && s.source.config.tied)))
            named.emplace_back(names[g], rates[g]);
    }
    return named;
}

// A resumed run keeps its rates. With AdamW those that are not given follow --lr.
void set_default_rates(TrainSetup& s) {
    const LearningRates defaults = s.resume.learning_rates.value_or(default_rates(s));
    std::optional<double>* const options[] = {&s.o.lr, &s.o.embedding_lr, &s.o.head_lr, &s.o.vector_lr};
    const bool of_muon = s.o.optimizer == OptimizerType::Muon && !s.o.muon.rms_scale();
    const size_t own = of_muon && !s.o.lora.on() ? NUM_RATE_GROUPS : 1;
    for (size_t g = 0; g < own; g++)
        if (!*options[g]) *options[g] = defaults[g];
    for (const auto& [name, rate] : named_rates(s)) set_toml(s.o.toml, name, json(rate).dump());  // every digit
}

// Of the first data directory, with so many samples a step.
double epochs_per_step(const TrainSetup& s, int64_t samples) {
    const Mixture mixture = mixture_of(s.data);
    const double sequences = double(num_training_sequences(s.sources()[0], s.o.seq_len));
    return double(samples) * double(mixture.share(0)) / double(mixture.period()) / sequences;
}

// A run from a checkpoint whose step has no given size takes fewer sequences a step where it would have few steps.
void choose_batch_size(TrainSetup& s, int64_t world) {
    TrainOptions& o = s.o;
    if (o.batch_given || o.total_batch_tokens || o.steps || s.source.directory.empty()) return;
    const double epochs = o.epochs > 0 ? o.epochs : defaults_of(s).epochs;
    const auto is_whole = [&](int64_t batch_size) { return !o.fp8.on || batch_size * o.seq_len % 16 == 0; };
    while (o.batch_size > 1 && is_whole(o.batch_size / 2) &&
           epochs / epochs_per_step(s, o.batch_size * world) < double(ENOUGH_STEPS))
        o.batch_size /= 2;
    set_toml(o.toml, "batch-size", std::to_string(o.batch_size));
}

// For a message.
std::string rounded(double number) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g", number);
    return text;
}

// A line, where a run from a checkpoint may be over before it has learnt much.
std::string few_steps_note(const TrainSetup& s) {
    const int64_t steps = s.o.steps - s.data_use.first_step;
    if (steps >= FEW_STEPS) return "";
    const bool in_micro_steps = s.micro_steps > 1;
    const int64_t now = in_micro_steps ? s.o.total_batch_tokens : s.o.batch_size;
    const std::string lower =
        str(" or lower ", in_micro_steps ? "--total-batch-tokens" : "--batch-size", " (now ", now, ")");
    return str("the whole run is ", steps, steps == 1 ? " step" : " steps",
               "; if it learns too little, raise --epochs (now ", s.o.epochs, ")", now > 1 ? lower : "", "\n");
}

// A line, where the schedule of a resumed run goes back to a higher rate.
std::string higher_rate_note(const TrainSetup& s) {
    const double had = s.resume.lr, has = s.resume.step ? learning_rate(s.o, s.resume.step - 1) : 0;
    if (had <= 0 || has <= 1.001 * had) return "";
    std::string same;
    for (const auto& [name, rate] : named_rates(s)) same += str(" --", name, " ", rounded(rate * had / has));
    return str("the learning rate goes up: it was ", rounded(had), " in step ", s.resume.step,
               ", where the schedule of ", s.o.steps, " steps has ", rounded(has), "; with", same,
               " it goes on from there\n");
}

// The length of the run, the warmup and the weight decay, where they are not given.
void set_defaults(TrainSetup& s) {
    const Defaults& d = defaults_of(s);
    const bool new_lr = !s.o.lr, new_length = !s.o.steps && s.o.epochs == 0, new_warmup = s.o.warmup < 0;
    const bool new_decay = !s.o.weight_decay, by_epochs = new_length || !s.o.steps;
    const bool new_batch = !s.o.batch_given && s.o.batch_size != TrainOptions().batch_size;
    if (new_length) {
        s.o.steps = d.steps;
        s.o.epochs = d.epochs;
    }
    if (!s.o.steps) {
        const double steps = std::ceil(s.o.epochs / s.epochs_per_step);
        require(steps < 0x1p40, "--epochs ", s.o.epochs, ": that is more than 2^40 steps; lower it");
        s.o.steps = s.data_use.first_step + std::max<int64_t>(int64_t(steps), 1);
    }
    if (new_warmup) s.o.warmup = int64_t(d.warmup * double(s.o.steps));
    if (new_decay) s.o.weight_decay = d.weight_decay;
    set_toml(s.o.toml, "steps", std::to_string(s.o.steps));
    set_toml(s.o.toml, "warmup", std::to_string(s.o.warmup));
    set_toml(s.o.toml, "weight-decay", str(*s.o.weight_decay));
    const PreferenceOptions preference = s.o.preference.options().value_or(PreferenceOptions());
    const bool new_beta = s.o.preference.on() && !s.o.preference.beta;
    const bool new_margin = preference.method == PreferenceMethod::SimPO && !s.o.preference.margin;
    if (new_beta) set_toml(s.o.toml, "beta", str(preference.beta));
    if (new_margin) set_toml(s.o.toml, "simpo-margin", str(preference.margin));
    set_default_rates(s);
    s.notes = higher_rate_note(s);
    if (&d == &FROM_SCRATCH || &d == &ON_ROLLOUTS) return;
    if (by_epochs && !s.resume.step) s.notes += few_steps_note(s);
    if (!(new_lr || new_length || new_batch || new_warmup || new_decay || new_beta || new_margin)) return;
    std::string chosen, from_scratch;
    const auto add = [&](bool is_new, const std::string& what, const std::string& otherwise) {
        if (!is_new) return;
        chosen += " " + what;
        if (!otherwise.empty()) from_scratch += (from_scratch.empty() ? "" : ", ") + otherwise;
    };
    const char* const unlike = s.o.optimizer == OptimizerType::Muon ? "Muon's rates" : "6e-4";
    add(new_lr, str("--lr ", *s.o.lr), unlike);
    add(new_length, str("--epochs ", s.o.epochs), str(FROM_SCRATCH.steps, " steps"));
    add(new_batch, str("--batch-size ", s.o.batch_size), str("batch size ", TrainOptions().batch_size));
    add(new_warmup, str("--warmup ", s.o.warmup), str(100 * FROM_SCRATCH.warmup, "% warmup"));
    add(new_decay, str("--weight-decay ", *s.o.weight_decay), str("weight decay ", FROM_SCRATCH.weight_decay));
    add(new_beta, str("--beta ", preference.beta), "");
    add(new_margin, str("--simpo-margin ", preference.margin), "");
    if (!from_scratch.empty()) from_scratch = " (from scratch: " + from_scratch + ")";
    s.notes = str("defaults for a run from a checkpoint:", chosen, from_scratch, "\n", s.notes);
}

// A split without loss tokens has no loss. limit: the first tokens of it are meant; 0: all.
void check_loss_tokens(const TokenFiles& files, int64_t limit) {
    const int64_t end = limit > 0 ? std::min(limit, files.size()) : files.size();
    std::vector<uint8_t> mask(size_t(std::min<int64_t>(end, 1 << 20)));
    bool found = !files.masked();
    for (int64_t begin = 0, n; !found && begin < end; begin += n) {
        n = std::min(end - begin, int64_t(mask.size()));
        files.read_mask(begin, n, mask.data());
        found = std::find(mask.begin(), mask.begin() + n, 1) != mask.begin() + n;
    }
    require(found, files.pattern(), ": the mask has no loss token",
            limit > 0 ? str(" in the first ", end, " tokens (--eval-tokens)") : "",
            "; use data with a response to learn from, or a split with one to score");
}

// Chooses --pack where it is not given, and packs the splits that have examples.
void pack_examples(TrainOptions& o, std::vector<TrainingData>& all) {
    const auto has_examples = [](const TrainingData& data) { return data.train_files.has_examples(); };
    const bool any_examples = std::any_of(all.begin(), all.end(), has_examples);
    if (o.pack.empty()) o.pack = any_examples ? "examples" : "none";
    require(o.pack == "none" || any_examples, "--pack examples: ", o.data,
            " is text, without examples; make data from conversations, or leave the option out");
    require(o.pack == "none" || !o.document_mask,
            "--document-mask: packed examples do not see each other anyway; leave the option out");
    const auto packed = [&](const TokenFiles& files) {
        return o.pack == "none" || !files.has_examples()
                   ? nullptr
                   : std::make_unique<ExamplePacking>(files, o.seq_len, o.too_long == "skip");
    };
    for (TrainingData& data : all) {
        check_loss_tokens(data.train_files, 0);
        if (data.val_files) check_loss_tokens(*data.val_files, o.pack == "none" ? o.eval_tokens : 0);
        data.train_packing = packed(data.train_files);
        if (data.val_files) data.val_packing = packed(*data.val_files);
        require(data.train_packing || data.train_files.size() > o.seq_len, data.train_files.pattern(), ": ",
                data.train_files.size(), " tokens are fewer than one training sequence of ", o.seq_len,
                " + 1; use more text or a shorter --seq-len");
    }
}

// A checkpoint never replaces anything, so the run could not save one of such a name.
void check_incomplete_checkpoints(const TrainSetup& s) {
    if (!is_directory(s.o.out)) return;
    for (const std::string& name : list_incomplete_checkpoints(s.o.out)) {
        const int64_t step = checkpoint_step(name);
        require(step <= s.resume.step || step > s.o.steps, "--out ", s.o.out, ": ", name,
                " is not a complete checkpoint, and this run may have to write one of that name; restore its files, "
                "move it away, or name another directory");
    }
}

// After the checkpoint was read: which data the run used until then, and uses from now on.
void continue_data_history(TrainSetup& s) {
    std::vector<DataUse>& uses = s.resume.data;
    if (s.o.new_data.empty()) {
        s.data_use.first_step = uses.back().first_step;
        uses.pop_back();
    } else {
        s.data_use.first_step = s.resume.step;
    }
}

// The prompts are user turns if one of the data directories was made with a chat template.
SamplePrompts sample_prompts(const TrainSetup& s) {
    const auto chat = std::find_if(s.data.begin(), s.data.end(),
                                   [](const TrainingData& data) { return data.directory.chat_template; });
    return read_sample_prompts(s.o.sample_prompts, chat == s.data.end() ? s.tokenizer_data() : chat->directory,
                               s.source, s.o.seq_len);
}

// Data of an older version does not say which token ends a turn; the model's own template does.
std::vector<int32_t> end_of_turn(const TrainSetup& s) {
    std::vector<int32_t> ids;
    for (const TrainingData& data : s.data) {
        const DataDirectory& directory = data.directory;
        int32_t id = directory.end_of_turn;
        if (id < 0 && directory.chat_template && ChatTemplate::exists(s.source.files))
            id = ChatTemplate(s.source.files).end_of_turn(Tokenizer(directory.tokenizer_path()));
        if (id >= 0) ids.push_back(id);
    }
    return ids;
}

// The micro-steps of a step, and of rollouts the most: completions that fit into a batch share one, so that none but
// the last has less than batch_size of them.
int64_t most_micro_steps(const TrainOptions& o, int64_t world) {
    const int64_t micro_tokens = o.batch_size * o.seq_len * world;
    return (o.total_batch_tokens + micro_tokens - 1) / micro_tokens;
}

// A checkpoint holds no rollout, so it is written where one ends.
void end_with_rollouts(TrainSetup& s) {
    const int64_t updates = s.o.rollout.updates;
    for (const auto& [name, value] : {std::pair{"steps", &s.o.steps}, std::pair{"save-every", &s.o.save_every}}) {
        if (*value % updates == 0) continue;
        *value += updates - *value % updates;
        set_toml(s.o.toml, name, std::to_string(*value));
        s.notes += str("--", name, " ", *value, ": a multiple of --updates-per-rollout ", updates,
                       ", because checkpoints are written where a rollout ends\n");
    }
}

// Reads what rollouts sample from, and chooses the sizes of batches, which hold any prompt with its completion.
std::unique_ptr<RolloutData> read_rollout_data(TrainOptions& o, const ModelSource& source, int64_t world) {
    if (!o.rollout.on()) return nullptr;
    const RolloutFlags& r = o.rollout;
    const ModelConfig& c = source.config;
    require(!source.directory.empty(), "--model ", source.name,
            " is a preset without weights; name a model that writes completions already");
    require(Tokenizer::exists(source.files), "--model ", source.name,
            " has no tokenizer.json, which prompts and completions need; add the file");
    require(r.prompts % world == 0, "--prompts ", r.prompts, " is not a multiple of the ", world,
            " ranks, each of which samples for as many prompts; the nearest multiples: ",
            nearest_multiples(r.prompts, world));
    require(r.temperature == 1 || (!c.head_bias && !c.logit_softcap), "--temperature ", r.temperature, ": ",
            source.name, " has a ", c.head_bias ? "bias in its head" : "softcap of its logits",
            ", with which only temperature 1 is supported; leave the option out");
    auto out = std::make_unique<RolloutData>();
    out->problems = read_problems(o.data, !o.scorer.command.command.empty());
    const Tokenizer tokenizer(source.files);
    out->prompts = answer_prompts(out->problems, o.data, r.chat_template, source, tokenizer);
    out->completion.max_tokens = r.max_tokens;
    if (!r.ignore_eos) {
        out->completion.eos = end_tokens(source, &tokenizer);
        out->prompts.add_end_tokens(out->completion.eos, tokenizer);
    }
    o.seq_len = out->prompts.longest + r.max_tokens;
    choose_sampler(o, c, this_target());
    set_toml(o.toml, "rollout", o.rollout.exact ? "\"exact\"" : "\"fast\"");  // a resumed run goes on so
    require(c.positions != Positions::Learned || o.seq_len <= c.max_positions, "the longest prompt has ",
            out->prompts.longest, " tokens; with --max-tokens ", r.max_tokens,
            " that is beyond the model's position table of ", c.max_positions, " rows; lower --max-tokens");
    if (o.fp8.on) o.seq_len = (o.seq_len + 15) / 16 * 16;
    o.total_batch_tokens = r.prompts * r.completions * o.seq_len;
    o.pack = "none";
    return out;
}

}  // namespace

TrainSetup check_training(TrainOptions o, int64_t world) {
    std::vector<TrainingData> all_data;
    if (!o.rollout.on()) all_data = open_training_data(o.data);
    const DataDirectory data = all_data.empty() ? DataDirectory{} : all_data[0].directory;
    ModelSource source = o.model.resolve(data.vocab_size);
    refuse_packed(source, "training");
    if (!o.rollout.on()) check_same_tokenizer(data, source);
    std::unique_ptr<RolloutData> rollout = read_rollout_data(o, source, world);
    // A fresh model's special ids are those of the tokenizer that it will be saved with.
    if (source.directory.empty() && data.end_of_text >= 0) source.config.bos = source.config.eos = data.end_of_text;
    require(!o.document_mask || data.end_of_text >= 0, "--document-mask: ", data.path,
            " does not say which token ends a document; leave the option out");

    require(o.batch_size < INT32_MAX / o.seq_len / world, "--batch-size ", o.batch_size, " x --seq-len ", o.seq_len,
            " is too large; lower one of them");
    check_fp8(o.fp8, source.config, o.model.type(), o.batch_size * o.seq_len, this_target());
    check_lora(o.lora, o.random_weights, source);
    if (o.rollout.on() && o.lora.on())
        require(!LoraTable(parameter_table(source.config, 1), o.lora, 1).vocabulary, "--lora-targets ",
                o.lora.targets.back(),
                ": rollouts take adapters of the blocks' matrices alone; leave out those of "
                "embedding and head");
    check_grad_rounding(o, world, backend_device());
    check_pairs(o, source, all_data);

    require(!o.head_lr || !source.config.tied, "--head-lr: the head of ", source.name,
            " is tied to the embedding; use --embedding-lr");

    if (!rollout) pack_examples(o, all_data);
    require(!o.sample_every || !data.tokenizer_path().empty(), "--sample-every: ", data.path,
            " has no tokenizer.json, which printing text needs; leave the option out");

    require(!path_exists(o.out) || is_directory(o.out), "--out ", o.out, " is a file; name a directory");
    const std::vector<std::string> checkpoints =
        path_exists(o.out) ? list_checkpoints(o.out) : std::vector<std::string>{};
    require(o.resume || checkpoints.empty(), "--out ", o.out,
            " already holds checkpoints; add --resume to continue, or name another directory");

    const DataUse use{0, o.data, rollout ? hash_of(read_file(o.data)) : fingerprint(all_data, mixture_of(all_data))};
    TrainSetup s{std::move(o), std::move(all_data), std::move(source), {}, use, {}};
    s.rollout = std::move(rollout);
    if (!s.o.eval_multiple_choice.empty()) {
        require(!s.tokenizer_data().tokenizer_path().empty(), "--eval-multiple-choice: ", s.tokenizer_data().path,
                " has no tokenizer.json, which questions need; leave the option out");
        s.questions = read_questions(s.o.eval_multiple_choice);
    }
    require(s.o.new_data.empty() || !checkpoints.empty(), "--new-data: ", s.o.out,
            " has no checkpoint to go on from; start the run with --data");
    if (s.o.sample_every) s.sample_prompts = sample_prompts(s);
    s.end_of_turn = end_of_turn(s);
    if (!checkpoints.empty()) {
        s.resume = read_resume_point(join_path(s.o.out, checkpoints.back()));
        check_unchanged(s);
        continue_data_history(s);
        const int64_t numbers = int64_t(s.resume.fp8_history.size());
        const int64_t expected = Fp8State(s.source.config, s.o.fp8).history_size();
        require(!numbers || numbers == expected, join_path(s.resume.checkpoint, "trainer.json"),
                ": key 'fp8.history' has ", numbers, " numbers, expected ", expected, "; the file is damaged");
    }
    if (!s.rollout) choose_batch_size(s, world);
    const int64_t micro_tokens = s.o.batch_size * s.o.seq_len * world;
    if (!s.o.total_batch_tokens) s.o.total_batch_tokens = micro_tokens;
    require(s.rollout || s.o.total_batch_tokens % micro_tokens == 0, "--total-batch-tokens ", s.o.total_batch_tokens,
            " is not a multiple of batch-size x seq-len x ranks = ", micro_tokens,
            "; the nearest multiples: ", nearest_multiples(s.o.total_batch_tokens, micro_tokens));
    s.micro_steps = most_micro_steps(s.o, world);
    s.epochs_per_step =
        s.rollout ? double(s.o.rollout.prompts) / double(s.o.rollout.updates * int64_t(s.rollout->problems.size()))
                  : epochs_per_step(s, s.o.total_batch_tokens / s.o.seq_len);
    set_defaults(s);
    if (s.rollout) end_with_rollouts(s);
    check_incomplete_checkpoints(s);
    require(!s.o.profile || (s.o.profile > s.resume.step && s.o.profile <= s.o.steps), "--profile ", s.o.profile,
            ": this run executes steps ", s.resume.step + 1, " to ", s.o.steps, "; name one of them");
    set_toml(s.o.toml, "data", str('"', s.o.data, '"'));
    if (!s.rollout) set_toml(s.o.toml, "total-batch-tokens", std::to_string(s.o.total_batch_tokens));
    if (!s.rollout) set_toml(s.o.toml, "pack", "\"" + s.o.pack + "\"");
    set_toml(s.o.toml, "dtype", str('"', s.o.model.dtype, '"'));
    return s;
}

void TrainSetup::set_memory_options(const RunOptions& options, int64_t world) {
    static_cast<RunOptions&>(o) = options;
    micro_steps = most_micro_steps(o, world);
    set_toml(o.toml, "batch-size", std::to_string(o.batch_size));
    set_toml(o.toml, "zero-stage", std::to_string(o.sharding.zero_stage));
    set_toml(o.toml, "recompute", str('"', o.recompute_text(), '"'));
    set_toml(o.toml, "master-weights", o.master_weights ? "\"on\"" : "\"off\"");
    const std::pair<const char*, const std::string&> names[] = {{"optimizer-dtype", o.optimizer_dtype},
                                                                {"grad-dtype", o.grad_dtype},
                                                                {"grad-rounding", o.grad_rounding},
                                                                {"offload", o.offload}};
    for (const auto& [key, name] : names) set_toml(o.toml, key, str('"', name, '"'));
}

namespace {

std::string describe_source(const TrainingData& data, int64_t sequences, int64_t dropped_tokens) {
    const std::string tokens = with_commas(data.train_files.size()) + " training tokens",
                      in_sequences = with_commas(sequences) + " training sequences";
    if (!data.train_packing)
        return str(tokens, " in ", in_sequences, " (", dropped_tokens, " tokens at the end left out)");
    const ExamplePacking& p = *data.train_packing;
    char padding[16];
    std::snprintf(padding, sizeof padding, "%.1f%%", 100 * double(p.padding()) / double(sequences * p.seq_len()));
    const char* const kind = p.has_pairs() ? " pairs" : " examples";
    return str(tokens, ": ", with_commas(p.has_pairs() ? p.num_pairs() : p.num_examples()), kind, " in ", in_sequences,
               " (", padding, " padding, ", with_commas(p.num_too_long()), " longer", kind, " left out)");
}

}  // namespace

std::string describe_training_data(const TrainSetup& s, const Loader& loader) {
    std::string text;
    const Mixture mixture = mixture_of(s.data);
    const int64_t samples = (s.o.steps - s.data_use.first_step) * (s.o.total_batch_tokens / s.o.seq_len);
    char epochs[40];
    std::snprintf(epochs, sizeof epochs, "%.3g epochs of ", s.epochs(s.o.steps));
    if (s.data.size() == 1) text = epochs;
    for (size_t k = 0; k < s.data.size(); k++) {
        const int64_t sequences = loader.num_training_sequences(k);
        const double share = double(mixture.share(k)) / double(mixture.period());
        char part[80];
        std::snprintf(part, sizeof part, "%.4g%% of the samples, %.3g epochs: ", 100 * share,
                      share * double(samples) / double(sequences));
        if (s.data.size() > 1) text += str(s.data[k].directory.path, ": ", part);
        text += describe_source(s.data[k], sequences, loader.dropped_tokens(k));
        if (k + 1 < s.data.size()) text += "\n";
    }
    return text;
}
