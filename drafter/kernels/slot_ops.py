"""Writes into a slot cache.

Shapes: B rows · H key/value heads · S slots of a row · K head dimension · T tokens of one forward · L moved slots.
"""

from torch import Tensor


def write_slots(
    keys: Tensor, values: Tensor, layer: int, row_B1: Tensor, slot_BT: Tensor, new_keys: Tensor, new_values: Tensor
) -> None:
    """Scatter one layer's new keys and values [B, H, T, K] to the slots of their rows.

    Args:
        keys, values: stores [layers, rows, H, S, K], written in place.
        layer: of the stores.
        row_B1: rows of the stores, int64 [B, 1].
        slot_BT: int64 [B, T].
        new_keys, new_values: the keys and values to write.
    """
    # A masked slot has weight 0 in attention, and 0 * NaN is NaN: an overflow at a drafted token, or in an earlier
    # request, must not reach other tokens.
    # Indices around a slice put the indexed dimensions first: the values go in as [B, T, H, K].
    keys[layer][row_B1, :, slot_BT] = new_keys.transpose(1, 2).nan_to_num(0.0, 0.0, 0.0)
    values[layer][row_B1, :, slot_BT] = new_values.transpose(1, 2).nan_to_num(0.0, 0.0, 0.0)


def move_slots(keys: Tensor, values: Tensor, row_B1: Tensor, source_BL: Tensor, destination_BL: Tensor) -> None:
    """Copy slots within rows, all layers at once: slot source[b, l] of row b becomes slot destination[b, l].

    All sources are read before anything is written, so the two may overlap.
    """
    for store in (keys, values):
        # The heads' slice stands between the two index tensors, so they lead: [B, L, layers, H, K].
        store[:, row_B1, :, destination_BL] = store[:, row_B1, :, source_BL]
