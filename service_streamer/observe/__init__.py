"""What batches did: records, histograms, what limits throughput. No I/O, no clock."""
