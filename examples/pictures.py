"""GRPO on pictures from nothing at all: a small random Qwen2.5-VL, squares to count, SFT on a few, then rewards.

python examples/pictures.py [FOLDER]      default: pictures/
"""

import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import reward_curve
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import surefoot

HERE = Path(__file__).parent
COLOURS = {"red": (210, 40, 40), "green": (40, 170, 70), "blue": (50, 70, 210)}
MOST = 4
SIDE = 84
ROWS, WARMUP_ROWS = 240, 96
CONTROLS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def write_model(folder: Path) -> None:
    """A Qwen2.5-VL of 0.3 million random weights, with a tokenizer of 300 tokens and its image processor."""
    words = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        [" ".join(COLOURS) + " How many squares, and of what colour? user assistant"] * 4, words
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(CONTROLS),
    )
    tokenizer.chat_template = TEMPLATE
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "initializer_range": 0.06,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    vision = {
        "depth": 3, "hidden_size": 48, "intermediate_size": 96, "num_heads": 3, "patch_size": 14,
        "out_hidden_size": 64, "spatial_merge_size": 2, "window_size": 56, "fullatt_block_indexes": [2],
        "initializer_range": 0.06,
    }  # fmt: skip
    ids = dict(zip(("vision_start", "vision_end", "image", "video"), CONTROLS[1:], strict=True))
    torch.manual_seed(1)
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=text,
            vision_config=vision,
            **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in ids.items()},
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=SIDE * SIDE, max_pixels=SIDE * SIDE).save_pretrained(folder)


def draw(path: Path, count: int, colour: str, chance: random.Random) -> None:
    """Squares in cells of their own, each a little out of place."""
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(picture)
    for cell in chance.sample(range(9), count):
        left, top = (28 * at + chance.randint(2, 8) for at in (cell % 3, cell // 3))
        pen.rectangle((left, top, left + 17, top + 17), fill=COLOURS[colour])
    picture.save(path)


def write(folder: Path) -> None:
    """Pictures with a question, as prompts with their answers, and some of them as conversations."""
    chance = random.Random(1)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    prompts: list[dict[str, Any]] = []
    for number in range(ROWS):
        count, colour = 1 + number % MOST, list(COLOURS)[number % len(COLOURS)]
        name = f"images/{number:04d}.png"
        draw(folder / name, count, colour, chance)
        asked = {"role": "user", "content": "<image>How many squares, and of what colour?"}
        prompts.append({"prompt": [asked], "answer": f"{count} {colour}", "images": [name]})
    talks = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": row["answer"]}], "images": row["images"]}
        for row in prompts[:WARMUP_ROWS]
    ]
    for name, rows in (("warmup.jsonl", talks), ("train.jsonl", prompts)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def main(folder: Path) -> None:
    began = time.perf_counter()
    for made in ("model", "warmup", "run"):  # of an earlier start
        shutil.rmtree(folder / made, ignore_errors=True)
    write(folder)
    write_model(folder / "model")

    print(f"1. SFT on {WARMUP_ROWS} of {ROWS} pictures", flush=True)
    warmup = surefoot.train(
        HERE / "grpo-vision-warmup.yaml",
        model=folder / "model",
        dataset=folder / "warmup.jsonl",
        output_dir=folder / "warmup",
        screen=False,
    )

    if warmup.status != "completed":
        raise SystemExit(f"{warmup.status} after {warmup.steps} steps")

    print("2. GRPO", flush=True)
    result = surefoot.train(
        HERE / "grpo-vision.yaml",
        model=folder / "warmup" / "model",
        dataset=folder / "train.jsonl",
        output_dir=folder / "run",
    )

    reward_curve.show(result)
    print(f"model: {result.artifact}")
    print(f"took {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "pictures"))
