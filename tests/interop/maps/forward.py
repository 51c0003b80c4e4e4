# SPDX-License-Identifier: Apache-2.0
"""Forward passes of the Megatron-Core and Meta layouts, written after the computations of their modules, so that
a wrong row of a matrix shows in the logits."""

import math

import torch
import torch.nn.functional as F


def rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def angles(length, head_dim, theta):
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return torch.outer(torch.arange(length, dtype=torch.float64), frequencies).float()


def rotate_halves(x, angle):
    """x [heads, length, head_dim]: element i turns with element i + head_dim / 2."""
    cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rotate_neighbours(x, angle):
    """Element 2i turns with element 2i + 1."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def attend(q, k, v):
    """q [heads, length, head_dim], k and v with fewer heads; causal."""
    k, v = (t.repeat_interleave(q.shape[0] // k.shape[0], 0) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


class Megatron:
    """One sequence through a GPT of Megatron-Core with these tensors."""

    def __init__(self, tensors, config, te=False):
        self.t, self.c, self.te = tensors, config, te
        self.gpt2 = config.model_type == "gpt2"
        self.heads = config.num_attention_heads
        self.groups = getattr(config, "num_key_value_heads", None) or self.heads
        self.theta = 0 if self.gpt2 else config.rope_parameters["rope_theta"]

    def norm(self, x, name):
        if self.gpt2:
            weight, bias = self.t[name + "weight"], self.t[name + "bias"]
            return F.layer_norm(x, weight.shape, weight, bias, self.c.layer_norm_epsilon)
        return rms(x, self.t[name + "weight"], self.c.rms_norm_eps)

    def linear(self, x, name):
        return F.linear(x, self.t[name + ".weight"], self.t.get(name + ".bias"))

    def attention(self, x, layer):
        at = layer + "self_attention."
        qkv = self.linear(x, at + "linear_qkv")
        share = self.heads // self.groups
        head_dim = qkv.shape[-1] // (self.groups * (share + 2))
        # A group holds its query heads, then its key, then its value.
        qkv = qkv.view(len(x), self.groups, share + 2, head_dim)
        q = qkv[:, :, :share].reshape(len(x), self.heads, head_dim).transpose(0, 1)
        k, v = qkv[:, :, share].transpose(0, 1), qkv[:, :, share + 1].transpose(0, 1)
        if at + "q_layernorm.weight" in self.t:
            q = rms(q, self.t[at + "q_layernorm.weight"], self.c.rms_norm_eps)
            k = rms(k, self.t[at + "k_layernorm.weight"], self.c.rms_norm_eps)
        if not self.gpt2:
            angle = angles(len(x), head_dim, self.theta)
            q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        return self.linear(attend(q, k, v), at + "linear_proj")

    def mlp(self, x, name, tail=""):
        inner = F.linear(x, self.t[f"{name}linear_fc1.weight{tail}"], self.t.get(f"{name}linear_fc1.bias"))
        if self.gpt2:
            inner = F.gelu(inner, approximate="tanh")
        else:
            gate, up = inner.chunk(2, -1)
            inner = F.silu(gate) * up
        return F.linear(inner, self.t[f"{name}linear_fc2.weight{tail}"], self.t.get(f"{name}linear_fc2.bias"))

    def experts(self, x, layer):
        scores = F.linear(x, self.t[layer + "mlp.router.weight"]).softmax(-1)
        share, chosen = scores.topk(self.c.num_experts_per_tok, -1)
        if getattr(self.c, "norm_topk_prob", True):
            share = share / share.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for token in range(len(x)):
            for weight, expert in zip(share[token], chosen[token].tolist()):
                if self.te:
                    made = self.mlp(x[token], layer + "mlp.experts.", str(expert))
                else:
                    made = self.mlp(x[token], f"{layer}mlp.experts.local_experts.{expert}.")
                out[token] += weight * made
        return out

    def __call__(self, tokens):
        x = self.t["embedding.word_embeddings.weight"][tokens]
        if self.gpt2:
            x = x + self.t["embedding.position_embeddings.weight"][: len(tokens)]
        for number in range(self.c.num_hidden_layers):
            layer = f"decoder.layers.{number}."
            before = layer + ("self_attention.linear_qkv.layer_norm_" if self.te else "input_layernorm.")
            x = x + self.attention(self.norm(x, before), layer)
            moe = layer + "mlp.router.weight" in self.t
            fused = self.te and not moe
            h = self.norm(x, layer + ("mlp.linear_fc1.layer_norm_" if fused else "pre_mlp_layernorm."))
            x = x + (self.experts(h, layer) if moe else self.mlp(h, layer + "mlp."))
        x = self.norm(x, "decoder.final_layernorm.")
        head = "output_layer.weight" if "output_layer.weight" in self.t else "embedding.word_embeddings.weight"
        return F.linear(x, self.t[head])


def meta(tensors, config, tokens):
    """One sequence through Meta's Llama, which torchtitan's llama3 is."""
    x = tensors["tok_embeddings.weight"][tokens]
    head_dim = config.head_dim
    angle = angles(len(tokens), head_dim, config.rope_parameters["rope_theta"])
    for number in range(config.num_hidden_layers):
        layer = f"layers.{number}."
        h = rms(x, tensors[layer + "attention_norm.weight"], config.rms_norm_eps)
        q, k, v = (F.linear(h, tensors[f"{layer}attention.w{part}.weight"])
                   .view(len(tokens), -1, head_dim).transpose(0, 1) for part in "qkv")
        q, k = rotate_neighbours(q, angle), rotate_neighbours(k, angle)
        x = x + F.linear(attend(q, k, v), tensors[layer + "attention.wo.weight"])
        h = rms(x, tensors[layer + "ffn_norm.weight"], config.rms_norm_eps)
        inner = F.silu(F.linear(h, tensors[layer + "feed_forward.w1.weight"]))
        inner = inner * F.linear(h, tensors[layer + "feed_forward.w3.weight"])
        x = x + F.linear(inner, tensors[layer + "feed_forward.w2.weight"])
    return F.linear(rms(x, tensors["norm.weight"], config.rms_norm_eps), tensors["output.weight"])
