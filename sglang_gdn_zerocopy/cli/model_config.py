"""What a model's config.json says about its GDN layers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_gdn_zerocopy.cli.errors import CommandError


@dataclass(frozen=True)
class GdnModel:
    """The GDN layers of a model. Head counts are of the whole model, dims in elements."""

    name: str
    layers: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int

    def qkv_dim(self, tp: int) -> int:
        """Width of packed QKV on one of ``tp`` ranks, in elements."""
        return (2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim) // tp


def read_model(folder: Path, tp: int) -> GdnModel | None:
    """The GDN layers in ``folder/config.json``, or None when the model has none (KDA and others).

    Raises :class:`CommandError` on an unreadable config, or when ``tp`` does not divide the heads.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror
        raise CommandError(
            f"--model {folder}: cannot read {path} ({reason}); name a folder with a config.json"
        ) from None
    except ValueError as error:
        raise CommandError(f"--model {folder}: {path} is no JSON ({error})") from None
    text = config.get("text_config", config) if isinstance(config, dict) else {}
    if "linear_num_key_heads" not in text:
        return None
    try:
        model = GdnModel(
            name=str(config.get("model_type", "unknown")),
            layers=_count_layers(text),
            num_k_heads=int(text["linear_num_key_heads"]),
            num_v_heads=int(text["linear_num_value_heads"]),
            head_k_dim=int(text["linear_key_head_dim"]),
            head_v_dim=int(text["linear_value_head_dim"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CommandError(f"--model {folder}: {path} has no usable {error}") from None
    if tp < 1 or model.num_k_heads % tp or model.num_v_heads % tp:
        heads = f"{model.num_k_heads} key and {model.num_v_heads} value heads"
        raise CommandError(f"--tp {tp} does not divide {heads}; choose a divisor of both")
    return model


def _count_layers(text: dict[str, Any]) -> int:
    kinds = text.get("layer_types")
    if kinds is not None:
        return sum(kind == "linear_attention" for kind in kinds)
    layers, interval = int(text["num_hidden_layers"]), int(text["full_attention_interval"])
    return layers - layers // interval
