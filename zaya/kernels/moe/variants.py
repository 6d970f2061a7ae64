"""Every specialisation of the MoE kernels that the tile tables can launch at ZAYA1-8B's shapes in bf16, for the
ahead-of-time gate: 16 experts, D = F = 2,048."""

import dataclasses
import math
from typing import Any

import triton
import triton.language as tl

from zaya.kernels import tiles
from zaya.kernels.aot import AotVariant
from zaya.kernels.moe import decode, permute
from zaya.kernels.moe import triton as kernels
from zaya.kernels.tiles import MoeTiles, Tile

EXPERTS = 16
DIVISIBLE = ("D", "F", "K", "N", "M", "R")
TYPES = dict.fromkeys(("rows_ptr", "slot_ptr", "offs_ptr", "counts_ptr"), "*i32")
TYPES |= {"ids_ptr": "*i64", "weight_ptr": "*fp32", "parts_ptr": "*fp32"}
SCALARS = ("T", "n_blocks", "count", *DIVISIBLE)


def _variant(kernel, name: str, constants: dict[str, Any], options: dict[str, int], types=None, **rest) -> AotVariant:
    """Types by name, unless in `types`: integers and strides i32, the rest pointers to bf16."""
    signature = {}
    for argument in (a for a in kernel.arg_names if a not in constants):
        scalar = argument in SCALARS or argument.startswith("stride_")
        signature[argument] = (types or {}).get(argument) or TYPES.get(argument, "i32" if scalar else "*bf16")
    divisible = tuple(a for a in DIVISIBLE if a in signature)
    return AotVariant(kernel, name, signature, constants, options, divisible, **rest)


def _block(*sizes: int) -> str:
    return f"tensordesc<bf16[{', '.join(map(str, sizes))}]>"


def _product(table: MoeTiles, tile: Tile, **more) -> dict[str, Any]:
    shape = {"E": EXPERTS, "E_PAD": 16, "BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "GROUP": tile.group}
    return shape | {"TMA": table.tma, "FLATTEN": tile.flatten} | more


def _up(table: MoeTiles, limit: str, save: bool) -> AotVariant:
    t = table.up
    types = {"x": _block(t.bm, t.bk), "pre": _block(t.bm, t.bn), "act": _block(t.bm, t.bn)}
    types["w"] = _block(1, 2, t.bn, t.bk) if t.wide else _block(t.bn, t.bk)
    constants = _product(table, t, WIDE=t.wide, SAVE=save, DTYPE=tl.bfloat16)
    name, work = ("up saving" if save else "up", "moe.up_saved" if save else "moe.up")
    types = types if table.tma else {}
    return _variant(kernels.moe_up_kernel, f"{name} {limit}", constants, t.launch, types, work=_work(work, table))


def _rows(table: MoeTiles, limit: str, name: str, t: Tile, nt: bool) -> AotVariant:
    types = {"a": _block(t.bm, t.bk), "w": _block(t.bn, t.bk) if nt else _block(t.bk, t.bn)}
    types = (types if table.tma else {}) | {"out_ptr": "*bf16", "weight_ptr": "*fp32" if nt else "*bf16"}
    constants = _product(table, t, NT=nt, WEIGHTED=nt, SPLIT=t.split > 1)
    work = _work(f"moe.{name}", table)
    return _variant(kernels.moe_rows_kernel, f"{name} {limit}", constants, t.launch, types, work=work)


def _dact(table: MoeTiles, limit: str) -> AotVariant:
    t = table.dact
    types = {"dy": _block(t.bm, t.bk), "w": _block(t.bk, t.bn)} if table.tma else {}
    constants = _product(table, t, SUB=t.split, DTYPE=tl.bfloat16)
    work = _work("moe.d_act", table)
    return _variant(kernels.moe_dact_kernel, f"dact {limit}", constants, t.launch, types, work=work)


def _dw(table: MoeTiles, limit: str, name: str, add: bool) -> AotVariant:
    t = table.dw
    types = {"a": _block(t.bk, t.bm), "b": _block(t.bk, t.bn)} if table.tma else {}
    types |= {"dw_ptr": "*fp32" if add else "*bf16"}
    gathers = {"A_TOKENS": name == "dw2" and not table.tma, "B_TOKENS": name == "dw1" and not table.tma}
    constants = _product(table, t, ADD=add, SPLIT=t.split > 1, **gathers)
    del constants["E_PAD"]
    constants["BT"] = constants.pop("BK")
    title = f"{name} {'into fp32 ' if add else ''}{limit}"
    return _variant(kernels.moe_dw_kernel, title, constants, t.launch, types, work=_work(f"moe.{name}", table))


def _work(row: str, table: MoeTiles) -> tuple[str, int]:
    return row, int(min(table.tokens, 32768))


def _permutation(table: MoeTiles, limit: str) -> list[AotVariant]:
    shape = {"E": EXPERTS, "E_PAD": 32, "BLOCK": permute.BLOCK}
    place = shape | {"PAD": table.pad, "CHUNK": permute.CHUNK}
    plain: dict[str, Any] = {"matrix": "none", "buffer_loads": False}  # a few integers per program
    found = [_variant(permute.moe_place_kernel, f"place {limit}", place | {"SINGLE": False}, {}, **plain)]
    if table is tiles.MOE["hip"][0] or table is tiles.MOE["cuda"][0]:
        found += [
            _variant(permute.moe_place_kernel, "place T<=256", place | {"SINGLE": True}, {}, **plain),
            _variant(permute.moe_count_kernel, "count", shape, {}, **plain),
            _variant(kernels.moe_weight_sums_kernel, "weight sums", {"BT": 256}, {}, {"out_ptr": "*fp32"}, **plain),
            *(_gather(*flags) for flags in ([(True, False), (True, True)] if table.tma else [(False, False)])),
        ]
    return found


def _gather(copy: bool, pair: bool) -> AotVariant:
    constants = {"E": EXPERTS, "BR": 8, "BD": 1024, "COPY": copy, "PAIR": pair}
    name = "gather two" if pair else "gather" if copy else "zero skipped"
    rest: dict[str, Any] = {"matrix": "none", "buffer_loads": False}
    return _variant(permute.moe_gather_kernel, name, constants, {"num_warps": 8}, **rest)


def _decode(tile: tiles.DecodeTile, tokens: int) -> list[AotVariant]:
    pad = triton.next_power_of_2(tokens)
    shape = {"E": EXPERTS, "E_PAD": 16, "T_PAD": pad, "BM": 1 if tile.vec else 16}
    shape |= {"VEC": tile.vec, "PDL": tile.pdl}
    rest: dict[str, Any] = {"matrix": "none" if tile.vec else "loop"}
    masks = {"sgpr_spills": (16, "scalar masks of the rows set to zero, kept in vector lanes outside the loop")}
    limit = f"T={tokens}" if tokens == 1 else f"T<={tokens}"
    sides: tuple[tuple[str, Any, int, int], ...] = (
        ("up", decode.moe_decode_up_kernel, tile.bn_up, tile.bk_up),
        ("down", decode.moe_decode_down_kernel, tile.bn_down, tile.bk_down),
    )
    found = []
    for name, kernel, bn, bk in sides:
        rest["allowances"] = masks if (name, pad) == ("down", 64) else {}
        rest["work"] = (f"moe.{name}", tokens)
        found.append(_variant(kernel, f"decode {name} {limit}", shape | {"BN": bn, "BK": bk}, tile.launch, **rest))
    return found


def _large(variant: AotVariant) -> AotVariant:
    """What the launcher picks once a tensor is over 2 GiB: 64-bit addresses, so no buffer loads."""
    return dataclasses.replace(variant, name=f"{variant.name}, over 2 GiB", large_tensors=True, buffer_loads=False)


def variants(backend: str) -> list[AotVariant]:
    """Every tile of the tables for "cuda" or "hip"."""
    found: list[AotVariant] = []
    for table in tiles.MOE[backend]:
        limit = "any T" if table.tokens == math.inf else f"T<={table.tokens:g}"
        found += [_up(table, limit, save) for save in (False, True)]
        found += [_rows(table, limit, "down", table.down, True), _rows(table, limit, "dx", table.dx, False)]
        found += [_dact(table, limit)]
        found += [_dw(table, limit, name, add) for name in ("dw1", "dw2") for add in (False, True)]
        found += _permutation(table, limit)
    if backend == "hip":
        found += [_large(v) for v in found if v.name.endswith("any T") and v.matrix == "loop"]
    for tile in tiles.MOE_DECODE[backend]:
        found += [v for tokens in ((1, tile.tokens) if tile.vec else (16, tile.tokens)) for v in _decode(tile, tokens)]
    return found
