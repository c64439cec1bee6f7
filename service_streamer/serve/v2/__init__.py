"""The Open Inference Protocol (KServe's V2) without a network: tensors, requests and answers.

     request ──▶ tensors ──▶ items ──▶ (the model) ──▶ results ──▶ tensors ──▶ answer

The same for HTTP and gRPC. Only ``arrays`` needs numpy.
"""
