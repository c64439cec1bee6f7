"""The Open Inference Protocol over gRPC, in the event loop of the web process."""
