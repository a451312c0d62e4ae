"""Reading a trace: its tables, SQL, and the rules that it must keep."""
