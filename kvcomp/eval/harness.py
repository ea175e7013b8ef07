"""The model `kvcomp` of lm-evaluation-harness: every task of it runs with a compressed cache.

    python -m kvcomp.eval.harness --model kvcomp --tasks gsm8k --batch_size 8 --device cuda \\
        --model_args pretrained=Qwen/Qwen3-4B,method=snapkv,budget=1024,interval=64,set_window=32,quantize=k8v4

is the command `lm_eval` itself, its options, output and errors unchanged; it only knows one model more. The harness has
no entry points (0.4.13), so plain `lm_eval --model kvcomp` cannot find a model of another package. From Python, import
this module, then call `lm_eval.simple_evaluate(model="kvcomp", ...)`.

With `--use_cache`, give each method a path of its own: the harness tells stored answers apart by request only.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm  # type: ignore[import-untyped]

from kvcomp.cache import CompressedCache
from kvcomp.core import Compressor
from kvcomp.methods import build_method
from kvcomp.pipeline import stages_of

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    raise ValueError(
        f"{(error.name or 'lm_eval').partition('.')[0]} is not installed: pip install 'kvcomp[eval]'"
    ) from error

Answer: TypeAlias = tuple[float, bool]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Text:
    """What one request asks: the log-probability of the last `scored` of `tokens`, the first `prompt` of which are read
    in one forward and the others decoded."""

    tokens: list[int]
    prompt: int
    scored: int


@register_model("kvcomp")
class CompressedLM(HFLM):  # type: ignore[misc]
    """`HFLM`, which takes every other argument, with a `CompressedCache` for each batch.

    `method` (`full`: nothing is evicted), `budget`, `interval`, `seed`, `protect_prompt` and `quantize` are those of
    `kvcomp generate`; `set_window=32` is its `--set window=32`. Without eviction and quantizer this is `HFLM`.

    Log-likelihoods are measured as in generation: the context is the prompt, read at once and then compressed, and the
    continuation is decoded, with a compression every `interval` tokens. So the first token of a continuation is scored
    before anything is compressed; with `decoded_context=n` the last `n` tokens of the context are decoded too, and
    every token of the continuation meets the compressed cache. In `loglikelihood_rolling` the prompt is as much of a
    window of `max_length` tokens as is not compressed: `budget` tokens, with a quantizer at most its `recent`.

    No result depends on `batch_size`: only prompts of the same length share a forward. With `padded_batches=True` all
    prompts of a batch of `generate_until` do, which is faster where lengths differ; then shorter ones are compressed
    earlier than they would be alone, as padding takes rows.

    Raises ValueError, before a model is loaded, for an argument that is wrong or looks misspelt, and for
    `batch_size=auto`, as the harness finds that by forwards without a cache.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        method: str = "vase-attnv",
        budget: int = 1024,
        interval: int = 64,
        seed: int = 0,
        protect_prompt: bool = False,
        quantize: str | None = None,
        decoded_context: int = 0,
        padded_batches: bool = False,
        **others: Any,
    ):
        _check_integers(
            budget=(budget, 1), interval=(interval, 1), seed=(seed, None), decoded_context=(decoded_context, 0)
        )
        settings = [f"{name[4:]}={others.pop(name)}" for name in list(others) if name.startswith("set_")]
        self.compressor = build_method(method, budget, protect_prompt, settings, quantize and str(quantize))
        _check_others(others, self.compressor)
        if not isinstance(padded_batches, bool):
            raise ValueError(f"padded_batches must be True or False, got {padded_batches!r}")
        self.interval, self.seed, self.protect_prompt = interval, seed, protect_prompt
        self.decoded_context, self.padded_batches = decoded_context, padded_batches
        super().__init__(pretrained, **others)
        if self.compressor is not None:
            self.new_cache()  # a model that cannot be compressed is refused before the first request

    def new_cache(self) -> CompressedCache:
        """An empty cache for one batch."""
        assert self.compressor is not None
        return CompressedCache(self.model, self.compressor, self.interval, self.seed)

    # generate_until ---------------------------------------------------------------------------------------------------

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Tensor:
        if self.compressor is None:
            return super()._model_generate(context, max_length, stop, **settings)
        if self.padded_batches:
            return super()._model_generate(context, max_length, stop, cache=self.new_cache(), **settings)
        mask, width = settings.pop("attention_mask"), context.shape[1]
        lengths: list[int] = mask.sum(-1).tolist()
        new: dict[int, Tensor] = {}
        for length in set(lengths):
            rows = [row for row, its in enumerate(lengths) if its == length]
            given = {"attention_mask": mask[rows, width - length :], "cache": self.new_cache(), **settings}
            ids = context[rows, width - length :]
            output = super()._model_generate(ids, max_length - (width - length), stop, **given)
            new |= zip(rows, output[:, length:], strict=True)
        answers = [new[row] for row in range(len(lengths))]
        filled = pad_sequence(answers, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        return torch.cat([context, filled], dim=1)

    # loglikelihood, loglikelihood_rolling -----------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        if self.compressor is None:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        texts = [self._text(*request) for request in requests]
        self._warn(texts)
        answers: list[Answer] = [(0.0, True)] * len(texts)
        silent = disable_tqdm or self.rank != 0
        with tqdm(total=len(texts), disable=silent, desc="Running loglikelihood requests") as bar:
            for batch in _batches(texts, override_bs or self.batch_size):
                for index, answer in zip(batch, self._score([texts[index] for index in batch]), strict=True):
                    answers[index], request = answer, requests[index][0]
                    if request is not None:
                        self.cache_hook.add_partial("loglikelihood", request, answer)
                bar.update(len(batch))
        return answers

    def _text(self, request: Any, context: list[int], continuation: list[int]) -> Text:
        """Cut on the left to `max_length` inputs, as `HFLM` does; windows of a rolling text come without a request."""
        if not context or not continuation or len(continuation) > self.max_length:
            counts = f"a context of {len(context)} and a continuation of {len(continuation)} tokens"
            raise ValueError(f"{counts}: give both at least 1, the second at most max_length={self.max_length}")
        if request is None and self.protect_prompt:
            raise ValueError(
                "protect_prompt=True: in loglikelihood_rolling all of `budget` is the prompt; leave it out"
            )
        tokens = (context + continuation)[-(self.max_length + 1) :]
        if cut := len(context) + len(continuation) - len(tokens):
            log.warning("max_length=%d: %d tokens cut on the left", self.max_length, cut)
        read = self._least() if request is None else len(tokens) - len(continuation) - self.decoded_context
        return Text(tokens, min(max(read, 1), len(tokens) - 1), len(continuation))

    def _least(self) -> int:
        """The longest prompt that is not compressed."""
        assert self.compressor is not None
        limits = [limit for limit in (self.compressor.budget, self.compressor.unpacked) if limit is not None]
        return min(limits, default=self.max_length)

    def _warn(self, texts: list[Text]) -> None:
        untouched = sum(len(text.tokens) - 1 == text.prompt > self._least() for text in texts)
        if untouched:
            share = f"{untouched} of {len(texts)} continuations have one token, scored before anything is compressed"
            log.warning("%s: pass decoded_context=1 to measure the compressed cache", share)

    def _score(self, texts: list[Text]) -> list[Answer]:
        """Log-probability, and whether greedy decoding gives the same, of texts with prompts of one length."""
        cache, start = self.new_cache(), texts[0].prompt
        # What is fed behind the end of a row comes after all of it that counts.
        ids = pad_sequence([torch.tensor(text.tokens, device=self.device) for text in texts], batch_first=True)
        ends = torch.tensor([len(text.tokens) - 1 for text in texts], device=self.device)[:, None]
        firsts = ends - torch.tensor([text.scored for text in texts], device=self.device)[:, None]
        total, greedy = torch.zeros(len(texts), device=self.device), torch.ones_like(ends[:, 0], dtype=torch.bool)
        prompts, rows = ids[:, :start].unique(dim=0, return_inverse=True)  # choices of a question share its prompt
        new = max(start - int(firsts.min()), 1)
        logits = self._forward(prompts, cache, new)[rows]
        cache.batch_select_indices(rows)
        while True:
            inputs, targets = torch.arange(start - new, start, device=self.device), ids[:, start - new + 1 : start + 1]
            scored = (inputs >= firsts) & (inputs < ends)
            logits = logits.log_softmax(-1, dtype=self.softmax_dtype)
            found = logits.gather(-1, targets[..., None])[..., 0].float()
            total += found.masked_fill(~scored, 0.0).sum(-1)
            greedy &= ((logits.argmax(-1) == targets) | ~scored).all(-1)
            if start == ids.shape[1] - 1:
                return list(zip(total.tolist(), greedy.tolist(), strict=True))
            new = 1 if start == texts[0].prompt else min(_room(cache), ids.shape[1] - 1 - start)
            logits = self._forward(ids[:, start : start + new], cache, new)
            start += new

    def _forward(self, ids: Tensor, cache: CompressedCache, keep: int) -> Tensor:
        """Logits of the last `keep` tokens."""
        mixed = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype=mixed, enabled=mixed is not None):
            return self.model(ids, cache=cache, logits_to_keep=keep).logits


def _room(cache: CompressedCache) -> int:
    """Tokens that can be fed at once so that all happens when it would with single tokens."""
    compressor, room = cache.compressor, [cache.interval]
    for layer in cache.compressed:
        rows = (layer.storage.rows, compressor.budget), (layer.storage.buffered, compressor.unpacked)
        room += [least + cache.interval - stored for stored, least in rows if least is not None]
        room.append(cache.interval - layer.count.uncounted)
    return max(min(room), 1)


def _batches(texts: list[Text], size: int) -> Iterator[list[int]]:
    """Indices of texts whose prompts are equally long, long ones first, equal ones side by side."""
    order = sorted(range(len(texts)), key=lambda i: (-texts[i].prompt, texts[i].tokens))
    for _, same in groupby(order, key=lambda i: texts[i].prompt):
        group = list(same)
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _check_integers(**wanted: tuple[object, int | None]) -> None:
    for name, (value, least) in wanted.items():
        if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
            raise ValueError(f"{name} must be an int{'' if least is None else f' of at least {least}'}, got {value!r}")


def _check_others(others: dict[str, Any], compressor: Compressor | None) -> None:
    """Refuses what `HFLM` would hand to the model unseen, or could not do with a compressed cache."""
    stages = () if compressor is None else stages_of(compressor)
    of_method = {field.name for stage in stages for field in fields(stage)}  # type: ignore[arg-type]
    own, taken = inspect.signature(CompressedLM).parameters, inspect.signature(HFLM).parameters
    for name in others.keys() - taken:
        if name in of_method:
            raise ValueError(f"{name} is a setting of the method: write set_{name}={others[name]}")
        for like in difflib.get_close_matches(name, own, 1, 0.75):
            raise ValueError(f"there is no model argument {name!r}: did you mean {like!r}?")
    if compressor is not None and str(others.get("batch_size")).startswith("auto"):
        raise ValueError("batch_size=auto is found by forwards without a cache: give a number, such as 8")


if __name__ == "__main__":
    cli_evaluate()
