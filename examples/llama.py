"""A small Llama of Hugging Face, trained with its own RMSNorm and with cuops's: logits, losses, tokens a second."""

import argparse
import copy
import time

import cuops
import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--hidden-size", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--tokens", type=int, default=32, help="in a sequence")
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()
if args.device.startswith("cuda") and not torch.cuda.is_available():
    parser.error("--device: PyTorch sees no GPU")
if args.steps < 2:
    parser.error(f"--steps: expected at least 2, of which the first is not timed, got {args.steps}")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402  pip install transformers

torch.manual_seed(0)
heads = max(args.hidden_size // 128, 2)
config = LlamaConfig(
    hidden_size=args.hidden_size, intermediate_size=args.hidden_size * 7 // 2, num_hidden_layers=args.layers,
    num_attention_heads=heads, num_key_value_heads=heads, vocab_size=args.hidden_size * 2,
)  # fmt: skip
model = LlamaForCausalLM(config).to(args.device, torch.bfloat16)
tokens = torch.randint(0, config.vocab_size, (args.batch, args.tokens), device=args.device)

with torch.no_grad():
    exact = copy.deepcopy(model).float()(tokens).logits
    before = model(tokens).logits
    replacement = cuops.nn.replace_rms_norm(model)
    after = model(tokens).logits
    replacement.undo()
print(replacement)
print(f"largest logit {exact.abs().max():.3f}; error against float32:", end=" ")
print(f"{(before - exact).abs().max():.4f} before, {(after - exact).abs().max():.4f} after", end="; ")
print(f"they differ by {(before - after).abs().max():.4f}")


def train(model: torch.nn.Module) -> tuple[list[float], float]:
    """The losses, and the tokens a second after the first step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[torch.Tensor] = []
    for step in range(args.steps):
        if step == 1:
            losses[0].item()  # waits for the GPU
            start = time.perf_counter()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], tokens.numel() * (args.steps - 1) / (time.perf_counter() - start)


replaced = copy.deepcopy(model)
cuops.nn.replace_rms_norm(replaced)
for name, each in {"transformers": model, "cuops": replaced}.items():
    losses, rate = train(each)
    print(f"{name:12} {rate:10.0f} tokens/s, loss", *(f"{loss:.4f}" for loss in losses))
