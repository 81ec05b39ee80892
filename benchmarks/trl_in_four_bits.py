"""Run the TRL script with its model's weights in NF4 by bitsandbytes.

python trl_in_four_bits.py PEER_SCRIPT [its arguments]
"""

import runpy
import sys
from functools import partial

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

sys.argv = sys.argv[1:]
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
AutoModelForCausalLM.from_pretrained = partial(AutoModelForCausalLM.from_pretrained, quantization_config=NF4)
runpy.run_path(sys.argv[0], run_name="__main__")
