"""A worker that does one job after another, and a way to give it jobs, with pika.

    pip install pika
    python examples/worker_pika.py                  # the worker; start as many as you like
    python examples/worker_pika.py resize photo.jpg  # send a job: the words are its text

A job is acknowledged when it is done: if a worker dies, another one gets it.
The broker is taken from AMQP_URL, else it is the one on this machine.
"""

import os
import sys

import pika  # type: ignore[import-untyped]
from pika.adapters.blocking_connection import BlockingChannel  # type: ignore[import-untyped]

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost:5672/")
QUEUE = "jobs"


def send(channel: BlockingChannel, job: str) -> None:
    # With confirms, publishing returns once the job is safe in the queue, and raises if it is not.
    channel.confirm_delivery()
    persistent = pika.BasicProperties(delivery_mode=pika.DeliveryMode.Persistent)
    channel.basic_publish("", QUEUE, job.encode(), persistent, mandatory=True)
    print("sent", job)


def do(job: str) -> None:
    print("doing", job, flush=True)


def work(channel: BlockingChannel) -> None:
    # One job at a time: what this worker is not doing stays available to the others.
    channel.basic_qos(prefetch_count=1)
    print("waiting for jobs, end with Ctrl-C", flush=True)
    for method, _, body in channel.consume(QUEUE):
        do(body.decode())
        channel.basic_ack(method.delivery_tag)


def main() -> None:
    connection = pika.BlockingConnection(pika.URLParameters(URL))
    try:
        channel = connection.channel()
        channel.queue_declare(QUEUE, durable=True)
        if len(sys.argv) > 1:
            send(channel, " ".join(sys.argv[1:]))
        else:
            work(channel)
    except KeyboardInterrupt:
        print("stopped")
    finally:
        connection.close()


main()
