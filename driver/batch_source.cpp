#include "driver/batch_source.h"

#include "driver/trainer.h"

namespace {

LoaderOptions loader_options(const Trainer& t) {
    LoaderOptions loading;
    loading.B = t.options.batch_size;
    loading.T = t.options.seq_len;
    loading.micro_steps = t.setup.micro_steps;
    loading.rank = t.ctx.rank;
    loading.world = t.ctx.world;
    loading.seed = t.options.seed;
    loading.documents = t.options.document_mask;
    loading.max_sequences = t.max_sequences();
    loading.end_of_text = t.setup.tokenizer_data().end_of_text;
    loading.vocab_size = t.model.config.vocab_size;
    return loading;
}

// Resumed, a run on one batch has the same one.
int64_t first_step(const Trainer& t) {
    return t.options.overfit_one_batch ? 0 : t.step - t.setup.data_use.first_step;
}

}  // namespace

LoadedBatches::LoadedBatches(const Trainer& t)
    : trainer(t), loader(t.setup.sources(), loader_options(t), first_step(t)) {}

std::string LoadedBatches::describe() const {
    const bool several = trainer.setup.data.size() > 1;
    return str(describe_training_data(trainer.setup, loader), several ? "\n" : ", ",
               with_commas(trainer.options.total_batch_tokens), several ? " tokens" : "", " a step");
}

int64_t LoadedBatches::begin_step(int64_t) {
    micro = 0;
    return trainer.setup.micro_steps;
}

const Batch& LoadedBatches::next() {
    if (!trainer.options.overfit_one_batch) return loader.next();
    if (int64_t(one_batch.size()) < trainer.setup.micro_steps) one_batch.push_back(loader.next());
    return one_batch[size_t(micro++)];
}

int64_t LoadedBatches::tokens() const {
    return trainer.options.total_batch_tokens;
}
