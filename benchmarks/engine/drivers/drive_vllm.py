"""vLLM's CPU build, offline. Arguments: MODEL_DIR DTYPE THREADS REPEATS BEGAN."""

import json
import os
import sys
import time

from points import BATCHES, prompt, rates


def main():
    folder, dtype, threads, repeats, began = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    from vllm import LLM, SamplingParams

    engine = LLM(model=folder, dtype=dtype, max_model_len=2048, max_num_seqs=max(BATCHES), enable_prefix_caching=False)

    def seconds(count, tokens, new_tokens, round_=0):
        prompts = [{"prompt_token_ids": prompt(index, tokens, round_)} for index in range(count)]
        start = time.perf_counter()
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - start

    found = {"start_s": round(time.time() - began, 2)}
    seconds(1, 128, 8)
    print(json.dumps(found | rates(seconds, repeats)))


if __name__ == "__main__":
    main()
