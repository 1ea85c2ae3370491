"""Train a small mixture-of-experts language model on the CPU, on text that every Python installation carries.

    python benchmarks/train_small_moe.py --out checkpoints/small-moe
    moe-ep-bench quality configs/quality-small.yaml

The text is the standard library's sources, without its tests, and the language reference inside pydoc; every twentieth
file is kept out of training, and a piece of each of these is left beside the model in heldout.txt. The model is an
OLMoE of four layers, each with 32 experts of which a token takes 4, and 2.1 million weights, which bfloat16 stores in
4.3 MB. Its router is trained without a balance loss, so that it is skewed as nothing forbids: the straggler that the
policies are about.

training.txt beside the model says what came of it: the loss on the held-out text, how full the fullest expert of each
layer is there, CPU and wall-clock time. Several ``--seed`` train one model each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 2048
NUM_EXPERTS, TOP_K, NUM_LAYERS, HIDDEN, FFN = 32, 4, 4, 128, 32
HELD_OUT_EVERY, HELD_OUT_CHARACTERS = 20, 2500
STEPS, RATE, WARM_UP_STEPS = 2000, 5e-3, 50
LENGTH, JUDGED_SEQUENCES = 128, 64  # tokens of a sequence


def corpus() -> tuple[list[str], list[str]]:
    """Files to train on, and a piece from the middle of every file held out, as text, in a fixed order.

    Pieces that stand in a training file too (tables of codecs do) are left out.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    apart = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__"}
    files: list[Path] = []
    for folder, inner, names in os.walk(library):
        inner[:] = [name for name in inner if name not in apart]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in sorted(files)]
    texts = [text for text in texts if len(text) > 1000]
    train = [text for number, text in enumerate(texts) if number % HELD_OUT_EVERY]
    pieces = [text[len(text) // 2 :][:HELD_OUT_CHARACTERS] for text in texts[::HELD_OUT_EVERY]]
    return train, [piece for piece in pieces if not any(piece in text for text in train)]


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the text itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_model(seed: int) -> OlmoeForCausalLM:
    torch.manual_seed(seed)
    return OlmoeForCausalLM(
        OlmoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=FFN,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP_K,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            router_aux_loss_coef=0.0,
            norm_topk_prob=False,
            initializer_range=0.06,
        )
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """All texts one after the other, each with an end, int64 [T]."""
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return torch.tensor([token for one in encoded for token in (*one.ids, tokenizer.eos_token_id)])


def train(model: OlmoeForCausalLM, tokens_T: Tensor, *, steps: int, batch: int, seed: int) -> dict[str, float]:
    """Predict the next token of random pieces of the text; returns what it took."""
    generator = torch.Generator().manual_seed(seed)
    # Routers and norms are left to themselves: decay would even out the router's logits.
    decayed = [weight for name, weight in model.named_parameters() if weight.dim() >= 2 and "gate.weight" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.dim() < 2 or "gate.weight" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
    begin, begin_cpu = time.monotonic(), time.process_time()
    place_S = torch.arange(LENGTH)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - step / steps)
        first_B1 = torch.randint(len(tokens_T) - LENGTH, (batch, 1), generator=generator)
        tokens_BS = tokens_T[first_B1 + place_S]
        loss = model(tokens_BS, labels=tokens_BS, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            cpu_s = time.process_time() - begin_cpu
            print(f"step {step}, {cpu_s:.0f} CPU seconds, loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return {
        "steps": steps,
        "tokens": steps * batch * LENGTH,
        "minutes": round((time.monotonic() - begin) / 60, 2),
        "cpu_seconds": round(time.process_time() - begin_cpu, 2),
    }


@torch.inference_mode()
def held_out_facts(model: OlmoeForCausalLM, tokens_T: Tensor) -> dict[str, Any]:
    """Cross-entropy in nats per token, and the fullest expert's pairs over the mean, by layer."""
    model.eval()
    length = min(LENGTH, len(tokens_T))
    rows = min(JUDGED_SEQUENCES, len(tokens_T) // length)
    tokens_BS = tokens_T[: rows * length].view(rows, length)
    answer = model(tokens_BS, labels=tokens_BS, use_cache=False, output_router_logits=True)
    fullest = []
    for logits_TE in answer.router_logits:
        load_E = logits_TE.topk(TOP_K, dim=-1).indices.flatten().bincount(minlength=NUM_EXPERTS)
        fullest.append(round(float(load_E.max() / load_E.float().mean()), 2))
    loss = torch.nn.functional.cross_entropy(answer.logits[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten())
    return {"held_out_nats": round(float(loss), 4), "fullest_expert_over_mean": fullest}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the checkpoint's folder; of several seeds DIR-<seed>"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step (%(default)s)")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one model for each (%(default)s)")
    options = parser.parse_args(arguments)
    train_texts, held_out = corpus()
    tokenizer = make_tokenizer(train_texts)
    tokens_T = encode(tokenizer, train_texts)
    print(f"{len(train_texts)} files, {len(tokens_T):,} tokens; {len(held_out)} files held out", file=sys.stderr)
    for seed in options.seed:
        folder = options.out if len(options.seed) == 1 else options.out.with_name(f"{options.out.name}-{seed}")
        model = make_model(seed)
        found = train(model, tokens_T, steps=options.steps, batch=options.batch, seed=seed)
        folder.mkdir(parents=True, exist_ok=True)
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "heldout.txt").write_text("".join(held_out), encoding="utf-8")
        # As `quality` reads it. Turning this one back to float32 would leave its rotary frequencies rounded.
        model = OlmoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
        facts = {
            **found,
            **held_out_facts(model, encode(tokenizer, ["".join(held_out)])),
            "seed": seed,
            "weights": model.num_parameters(),
            "python": sys.version.split()[0],
            "torch": torch.__version__,
        }
        (folder / "training.txt").write_text(json.dumps(facts, indent=2) + "\n")
        print(json.dumps(facts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
