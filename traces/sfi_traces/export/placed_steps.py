"""When each step began and ended, for every kind of timeline."""

# a step lasts from its first span to its last, and not beyond the beginning of the request's next one; a
# prompt's earlier pieces are part of step 0
PLACED_STEPS = """
    CREATE TEMP VIEW placed_steps AS
    WITH extents AS (
        SELECT request AS batch, greatest(step, 0) AS batch_step, min(begin_us) AS begin_us,
            max(begin_us + elapsed_us) AS end_us
        FROM chosen_timings GROUP BY ALL
    )
    SELECT timed_steps.*, extents.begin_us,
        least(end_us, lead(begin_us) OVER (PARTITION BY request ORDER BY step)) AS end_us
    FROM timed_steps JOIN extents USING (batch, batch_step)
"""
