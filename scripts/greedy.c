// Token ids in; the logits of the prompt and greedy tokens out, by llama.cpp in fp32 on the CPU. See to_gguf.py.

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "llama.h"

static void quiet(enum ggml_log_level level, const char * text, void * data) {
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

// Usage: greedy MODEL LOGITS_FILE NEW_TOKENS ID..
int main(int count, char ** words) {
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers = 0;
    struct llama_model * model = llama_model_load_from_file(words[1], model_params);
    if (!model) return 1;

    int prompt = count - 4, new_tokens = atoi(words[3]);
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = prompt + new_tokens;
    params.n_batch = params.n_ubatch = prompt;
    params.type_k = params.type_v = GGML_TYPE_F32;
    // The default is 4 whatever the machine has, and threads that share a core wait for each other, spinning.
    params.n_threads = params.n_threads_batch = (int) sysconf(_SC_NPROCESSORS_ONLN);
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    struct llama_context * context = llama_init_from_model(model, params);
    if (!context) return 1;

    int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    FILE * file = fopen(words[2], "wb");
    if (!file) return 1;
    struct llama_batch batch = llama_batch_init(prompt, 0, 1);
    batch.n_tokens = prompt;
    for (int i = 0; i < prompt; i++) {
        batch.token[i] = atoi(words[4 + i]);
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    if (llama_decode(context, batch)) return 1;
    for (int i = 0; i < prompt; i++) fwrite(llama_get_logits_ith(context, i), sizeof(float), vocabulary, file);
    if (fclose(file)) return 1;

    for (int i = 0; i < new_tokens; i++) {
        const float * logits = llama_get_logits_ith(context, -1);
        llama_token best = 0;
        for (int id = 1; id < vocabulary; id++)
            if (logits[id] > logits[best]) best = id;
        printf("%d ", best);
        if (i + 1 < new_tokens && llama_decode(context, llama_batch_get_one(&best, 1))) return 1;
    }
    return 0;
}
