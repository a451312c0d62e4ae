"""Even masses in place of unknown ones, for views that show where a step read."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def even_shares(supports: pa.Table) -> pa.Table:
    """Give each position of a row without masses the same share of the row.

    `supports` are rows of the table `supports` with `positions` and `mass`; known masses stay.
    """
    if not supports["mass"].null_count:
        return supports
    size = pc.list_value_length(supports["positions"])
    even = np.repeat(1 / np.maximum(1, size.to_numpy()), size.to_numpy()).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(size.to_numpy())]).astype(np.int32)
    lists = pa.chunked_array([pa.ListArray.from_arrays(offsets, pa.array(even))])
    known = pc.coalesce(supports["mass"], lists)
    return supports.set_column(supports.column_names.index("mass"), "mass", known)
