# The compiled twin of hot.py. Its interface is that of the pure one, which mypy can check.
from leveret.protocol.hot import cut as cut
from leveret.protocol.hot import encode_acks as encode_acks
from leveret.protocol.hot import encode_deliveries as encode_deliveries
from leveret.protocol.items import AckRun as AckRun
from leveret.protocol.items import PublishRun as PublishRun
from leveret.protocol.items import RawFrame as RawFrame
from leveret.protocol.message import Message as Message
