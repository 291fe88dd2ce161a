"""A Llama in plain torch for training the demo pair; its parameter names are Hugging Face's.

Only for training: f32 weights under a bf16 autocast. The exported checkpoint is evaluated through transformers,
which shares no code with this file.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one model, under the names of Hugging Face's LlamaConfig."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    num_hidden_layers: int
    vocab_size: int = 2048
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


TARGET = Shape(256, 4, 2, 704, 5)
DRAFT = Shape(128, 2, 1, 352, 2)


class Norm(nn.Module):
    """RMS norm over the last axis, with a learned scale."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x: [..., size] -> the same."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions (rotate-half layout)."""

    def __init__(self, shape: Shape):
        super().__init__()
        heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.dim, self.groups = dim, heads // kv_heads
        self.q_proj = nn.Linear(shape.hidden_size, heads * dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, T, hidden]; cos, sin: [T, D]. Returns [B, T, hidden]."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden] -> the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, T, hidden] -> the same."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A decoder with tied embeddings. state_dict() has Hugging Face's names without the `model.` prefix."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        half = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.arange(shape.max_position_embeddings)[:, None] / shape.rope_theta**half
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                depth_scale = (2 * shape.num_hidden_layers) ** -0.5 if "o_proj" in name or "down_proj" in name else 1.0
                nn.init.normal_(weight, std=0.02 if "embed" in name else depth_scale * weight.shape[1] ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: i64[B, T]. Returns logits [B, T, V], bf16 under autocast."""
        length = tokens.shape[1]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(x), self.embed_tokens.weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with each head turned by its position. x: [B, H, T, D]; cos, sin: [T, D]."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
