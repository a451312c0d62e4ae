"""Results of benchmarks and evaluations as Parquet files and figures."""
