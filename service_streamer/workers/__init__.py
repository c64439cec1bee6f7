"""What runs a model: threads and processes behind one transport contract."""
