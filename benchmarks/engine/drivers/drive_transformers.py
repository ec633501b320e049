"""transformers' generate. Arguments: MODEL_DIR DTYPE THREADS REPEATS BEGAN."""

import json
import sys
import time

import torch
from points import BATCHES, NEW_TOKENS, PREFILL_TOKENS, PROMPT_TOKENS, prompt
from transformers import AutoModelForCausalLM

folder, dtype, threads, repeats, began = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def seconds(count, tokens, new_tokens, round_=0):
    ids = torch.tensor([prompt(index, tokens, round_) for index in range(count)])
    start = time.perf_counter()
    fixed = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 2}
    model.generate(ids, attention_mask=torch.ones_like(ids), **fixed)
    return time.perf_counter() - start


with torch.inference_mode():
    found = {"start_s": round(time.time() - began, 2)}
    seconds(1, 32, 4)
    for batch in BATCHES:
        times = [seconds(batch, PROMPT_TOKENS, NEW_TOKENS, round_) for round_ in range(1 if batch > 8 else repeats)]
        found[f"b{batch}_tok_s"] = round(batch * NEW_TOKENS / min(times), 1)
    found["prefill_1024_tok_s"] = round(PREFILL_TOKENS / min(seconds(1, PREFILL_TOKENS, 1, round_) for round_ in range(repeats + 1)), 1)
print(json.dumps(found))
