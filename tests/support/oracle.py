"""A decoder written from the formulas, in float64, that takes RoPE indices and visibility as they should be.

Independent of Transformers and of rope_patch: it only reads weights and sizes. Covers Llama, Qwen2, Qwen3 and Mistral.
"""

import math

import torch

Weights = dict[str, torch.Tensor]


def weights_of(model: torch.nn.Module) -> Weights:
    """Leaf copies in float64 that take gradients."""
    return {n: p.detach().double().clone().requires_grad_() for n, p in model.named_parameters()}


def default_frequencies(config) -> torch.Tensor:
    """theta_j = B^(-2j/d)."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    j = torch.arange(head_dim // 2, dtype=torch.float64)
    return config.rope_parameters["rope_theta"] ** (-2 * j / head_dim)


def causal(seq_len: int, window: int | None = None) -> torch.Tensor:
    """visible[i, j]: key j is at most i and, with a window, less than `window` tokens away."""
    i, j = torch.arange(seq_len)[:, None], torch.arange(seq_len)[None]
    return (j <= i) & (i - j < (window or seq_len + 1))


def logits(
    weights: Weights,
    config,
    input_ids: torch.Tensor,
    rope_index: torch.Tensor,
    visible: torch.Tensor,
    frequencies: torch.Tensor | None = None,
    attention_factor: float = 1.0,
    distance: torch.Tensor | None = None,
    record: list[dict[str, torch.Tensor]] | None = None,
    query_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits [batch, seq_len, vocab], float64.

    Args:
        weights: from `weights_of`.
        config: of the model.
        input_ids: [batch, seq_len].
        rope_index: [batch, seq_len], or one for each layer, [n_layers, batch, seq_len].
        visible: [batch, seq_len, seq_len] bool, query by key; or one for each layer, [n_layers, batch, seq_len,
            seq_len]; or for each head of those too, [n_layers, batch, n_heads, seq_len, seq_len]. Rows that see nothing
            come out as zeros.
        frequencies: [head_dim / 2], or one row for each layer, [n_layers, head_dim / 2]; None means the config's base.
        attention_factor: multiplies cos and sin.
        distance: what RoPE is to take for each query's distance from each key, [batch, seq_len, seq_len]; None means
            the difference of their indices.
        query_scale: factor of each query, [batch, seq_len].
        record: one dictionary a layer is added: q and k after RoPE, q_pre and k_pre before, v, and the output `hidden`;
            heads are not repeated. The last `hidden` is after the final norm.
    """
    frequencies = default_frequencies(config) if frequencies is None else frequencies.double()
    head_dim = 2 * frequencies.shape[-1]
    frequencies = frequencies.expand(config.num_hidden_layers, head_dim // 2)
    n_heads, n_kv_heads = config.num_attention_heads, config.num_key_value_heads
    batch, seq_len = input_ids.shape
    rope_index = rope_index.double().expand(config.num_hidden_layers, batch, seq_len)
    see = (
        visible if visible.ndim == 5 else visible.expand(config.num_hidden_layers, batch, seq_len, seq_len)[:, :, None]
    )
    angle = (
        rope_index[:, :, None, :, None] * frequencies[:, None, None, None]
    )  # [n_layers, batch, 1, seq_len, head_dim / 2]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * weights[name]

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = weights.get(f"{name}.bias")
        return x @ weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def rotate(x: torch.Tensor, layer: int) -> torch.Tensor:
        cos, sin = angle[layer].cos() * attention_factor, angle[layer].sin() * attention_factor
        first, second = x[..., : head_dim // 2], x[..., head_dim // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    h = weights["model.embed_tokens.weight"][input_ids]
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        x = norm(h, f"{at}.input_layernorm.weight")
        q = project(x, f"{at}.self_attn.q_proj").view(batch, seq_len, n_heads, head_dim)
        k = project(x, f"{at}.self_attn.k_proj").view(batch, seq_len, n_kv_heads, head_dim)
        v = project(x, f"{at}.self_attn.v_proj").view(batch, seq_len, n_kv_heads, head_dim).transpose(1, 2)
        if f"{at}.self_attn.q_norm.weight" in weights:
            q, k = norm(q, f"{at}.self_attn.q_norm.weight"), norm(k, f"{at}.self_attn.k_norm.weight")
        q_pre, k_pre = q.transpose(1, 2), k.transpose(1, 2)
        q, k = rotate(q_pre, layer), rotate(k_pre, layer)
        seen = {"q": q, "k": k, "v": v, "q_pre": q_pre, "k_pre": k_pre}
        k, v = (t.repeat_interleave(n_heads // n_kv_heads, 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2)
        if distance is not None:
            # with q and k as complex numbers, Re(q conj(k) e^(i m theta)) for distance m
            q1, q2 = (x[:, :, :, None] for x in q_pre.split(head_dim // 2, -1))
            k_own = k_pre.repeat_interleave(n_heads // n_kv_heads, 1)
            k1, k2 = (x[:, :, None] for x in k_own.split(head_dim // 2, -1))
            turned = distance.double()[:, None, :, :, None] * frequencies[layer]
            parts = (q1 * k1 + q2 * k2) * turned.cos() - (q2 * k1 - q1 * k2) * turned.sin()
            scores = attention_factor**2 * parts.sum(-1)
        if query_scale is not None:
            scores = scores * query_scale.double()[:, None, :, None]
        scores = (scores / math.sqrt(head_dim)).masked_fill(~see[layer], -torch.inf)
        probabilities = scores.softmax(-1).nan_to_num(0.0)
        out = (probabilities @ v).transpose(1, 2).reshape(batch, seq_len, n_heads * head_dim)
        h = h + project(out, f"{at}.self_attn.o_proj")
        x = norm(h, f"{at}.post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(project(x, f"{at}.mlp.gate_proj"))
        h = h + project(gate * project(x, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
        if record is not None:
            last = layer == config.num_hidden_layers - 1
            record.append({**seen, "hidden": norm(h, "model.norm.weight") if last else h})
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm(h, "model.norm.weight") @ head.T
