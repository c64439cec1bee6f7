"""What runs beside a model, and the ways to it: threads and processes behind one contract."""
