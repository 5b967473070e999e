"""mori's HIP backend before ROCm/mori#593: dispatch has no scale rows."""
