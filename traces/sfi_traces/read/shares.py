"""Positions without a known mass, for what shows where a step read."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def even_shares(supports: pa.Table) -> pa.Table:
    """Give each position of a row without masses the same share, so that it can be drawn as others are.

    Args:
        supports: Rows of the table `supports`, with `positions` and `mass`; an import may lack masses.

    Returns:
        The same rows; where a row has masses they stay.
    """
    if not supports["mass"].null_count:
        return supports
    size = pc.list_value_length(supports["positions"])
    even = np.repeat(1 / np.maximum(1, size.to_numpy()), size.to_numpy()).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(size.to_numpy())]).astype(np.int32)
    lists = pa.chunked_array([pa.ListArray.from_arrays(offsets, pa.array(even))])
    known = pc.coalesce(supports["mass"], lists)
    return supports.set_column(supports.column_names.index("mass"), "mass", known)
