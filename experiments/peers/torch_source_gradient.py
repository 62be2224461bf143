"""The peer of `experiments.bench_learner`, run in the environment that has PyTorch and transformers.

    python torch_source_gradient.py MODEL_FOLDER INPUTS.npz

Reads one request a line from standard input, "LENGTH CHECKPOINTING(0|1)", computes one source gradient and answers its
seconds.  Logits are made for the scored positions only, as transformers allows.
"""

import sys
import time
import warnings

import numpy as np
import torch
import transformers


def main():
  warnings.filterwarnings('ignore', category=FutureWarning)  # on names of this version's checkpointing switch
  transformers.utils.logging.disable_progress_bar()
  torch.set_num_threads(1)
  model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
  model.config.use_cache = False
  model.train()  # no dropout in this family; checkpointing works in training mode only
  inputs = np.load(sys.argv[2])
  print('ready', flush=True)
  for line in sys.stdin:
    length, checkpointing = line.split()
    if checkpointing == '1':
      model.gradient_checkpointing_enable()
    else:
      model.gradient_checkpointing_disable()
    tokens = torch.from_numpy(inputs[f'tokens_{length}']).long()
    at = torch.from_numpy(inputs[f'scored_{length}']).long()
    model.zero_grad(set_to_none=True)
    begin = time.perf_counter()
    logits = model(tokens[None, :-1], logits_to_keep=at - 1).logits[0]
    score = torch.log_softmax(logits, dim=-1)[torch.arange(len(at)), tokens[at]].mean()
    score.backward()
    print(time.perf_counter() - begin, float(score.detach()), flush=True)


if __name__ == '__main__':
  main()
