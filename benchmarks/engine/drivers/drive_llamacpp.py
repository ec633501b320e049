"""llama.cpp through llama-cpp-python's low-level interface. Arguments: GGUF KIND (bf16 or q8_0) THREADS REPEATS BEGAN."""

import json
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np
from points import prompt, rates

path, kind, threads, repeats, began = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
llama_cpp.llama_backend_init()
if kind == "q8_0":
    quantised = path.removesuffix(".gguf") + "-q8_0.gguf"
    if not Path(quantised).exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.nthread, params.ftype = threads, 7
        if llama_cpp.llama_model_quantize(path.encode(), quantised.encode(), params) != 0:
            sys.exit("llama.cpp could not quantise the model to Q8_0")
    path, began = quantised, time.time()
model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
if not model:
    sys.exit("llama.cpp could not load the model")
vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))


def context_for(count, length):
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = count * length, 2048, 512, count
    params.n_threads = params.n_threads_batch = threads
    return llama_cpp.llama_init_from_model(model, params)


def decode(context, rows):
    """rows: (token, position, sequence, whether it is scored)."""
    batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
    for index, (token, position, sequence, scored) in enumerate(rows):
        batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, position, 1
        batch.seq_id[index][0], batch.logits[index] = sequence, scored
    batch.n_tokens = len(rows)
    if llama_cpp.llama_decode(context, batch) != 0:
        sys.exit("llama.cpp could not compute a batch")
    llama_cpp.llama_batch_free(batch)


def best(context, row):
    return int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, row), shape=(vocabulary,)).argmax())


def seconds(count, tokens, new_tokens, round_=0):
    context, start, chosen = context_for(count, tokens + new_tokens + 16), time.perf_counter(), []
    for sequence in range(count):
        ids = prompt(sequence, tokens, round_)
        decode(context, [(token, position, sequence, position == tokens - 1) for position, token in enumerate(ids)])
        chosen.append(best(context, tokens - 1))
    for step in range(new_tokens - 1):
        decode(context, [(token, tokens + step, sequence, True) for sequence, token in enumerate(chosen)])
        chosen = [best(context, row) for row in range(count)]
    took = time.perf_counter() - start
    llama_cpp.llama_free(context)
    return took


found = {"start_s": round(time.time() - began, 2)}
seconds(1, 16, 4)
print(json.dumps(found | rates(seconds, repeats)))
