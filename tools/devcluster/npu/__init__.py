"""Pretend Ascend NPUs: a device plugin for the kubelet and an npu-exporter, both driven by one state file.

`deviceplugin.proto` (v1beta1) and `podresources.proto` (v1) are those of k8s.io/kubelet. The `_pb2` files are made from
them in `tools/`, by grpcio-tools 1.75, so that older versions of grpcio and protobuf can load them too:
`python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. devcluster/npu/*.proto`.
"""
