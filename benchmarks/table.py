#!/usr/bin/env python3
"""Turn the JSON that versus.py wrote into the table of docs/performance.md.

benchmarks/table.py versus.json
"""

import json
import sys


def main() -> None:
    with open(sys.argv[1]) as file:
        result = json.load(file)
    boot = result.pop("boot_s", {})
    print("| scenario | Leveret | RabbitMQ | rate | CPU µs/msg | CPU | p99 ms |")
    print("|---|---|---|---|---|---|---|")
    for name, row in result.items():
        ours, theirs = row["ours"], row["rabbitmq"]
        rate = "publish_rate" if row["figure"] == "publish_rate" else "consume_rate"
        times = ours[rate] / theirs[rate] if theirs.get(rate) else 0
        print(
            f"| {name} | {ours[rate]:,.0f} | {theirs[rate]:,.0f} | {times:.2f} |"
            f" {ours['cpu_us_per_msg']:.1f} / {theirs['cpu_us_per_msg']:.1f} |"
            f" {row['cpu_ratio']:.2f} |"
            f" {ours['p99_us'] / 1000:.1f} / {theirs['p99_us'] / 1000:.1f} |"
        )
    if boot:
        print(f"\nFirst answer after start: {boot['ours']} s; RabbitMQ {boot['rabbitmq']} s.")


if __name__ == "__main__":
    main()
