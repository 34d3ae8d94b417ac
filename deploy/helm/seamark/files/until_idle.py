"""Ends when the vLLM of this pod has no request left, or is gone; first waits the seconds that are its argument."""

import re
import sys
import time
import urllib.request

own = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the environment names
time.sleep(float(sys.argv[1]))
while True:
    try:
        with own.open("http://127.0.0.1:8000/metrics", timeout=10) as answer:
            counts = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", answer.read().decode(), re.M)
    except OSError:
        break
    if not any(map(float, counts)):
        break
    time.sleep(1)
