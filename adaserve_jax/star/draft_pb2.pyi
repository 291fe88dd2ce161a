from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TargetFrame(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[FromTarget]
    def __init__(self, messages: _Optional[_Iterable[_Union[FromTarget, _Mapping]]] = ...) -> None: ...

class ServiceFrame(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[FromService]
    def __init__(self, messages: _Optional[_Iterable[_Union[FromService, _Mapping]]] = ...) -> None: ...

class FromTarget(_message.Message):
    __slots__ = ("hello", "open", "draft", "close")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    open: Open
    draft: Draft
    close: Close
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class FromService(_message.Message):
    __slots__ = ("welcome", "refused", "tree", "resync", "load")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refused: Refused
    tree: Tree
    resync: Resync
    load: Load
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., tree: _Optional[_Union[Tree, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "target_id", "vocabulary_hash", "cells_hash", "draft_version", "verify_s", "plain_s")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_ID_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_HASH_FIELD_NUMBER: _ClassVar[int]
    CELLS_HASH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    PLAIN_S_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    target_id: str
    vocabulary_hash: str
    cells_hash: str
    draft_version: str
    verify_s: float
    plain_s: float
    def __init__(self, protocol_version: _Optional[int] = ..., target_id: _Optional[str] = ..., vocabulary_hash: _Optional[str] = ..., cells_hash: _Optional[str] = ..., draft_version: _Optional[str] = ..., verify_s: _Optional[float] = ..., plain_s: _Optional[float] = ...) -> None: ...

class LevelTime(_message.Message):
    __slots__ = ("rows", "width", "seconds")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    width: int
    seconds: float
    def __init__(self, rows: _Optional[int] = ..., width: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class CatchupTime(_message.Message):
    __slots__ = ("tokens", "seconds")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    seconds: float
    def __init__(self, tokens: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "draft_version", "max_depth", "max_width", "max_context", "max_sessions", "lease_s", "level_times", "catchup_times")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MAX_WIDTH_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    LEVEL_TIMES_FIELD_NUMBER: _ClassVar[int]
    CATCHUP_TIMES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    draft_version: str
    max_depth: int
    max_width: int
    max_context: int
    max_sessions: int
    lease_s: float
    level_times: _containers.RepeatedCompositeFieldContainer[LevelTime]
    catchup_times: _containers.RepeatedCompositeFieldContainer[CatchupTime]
    def __init__(self, protocol_version: _Optional[int] = ..., draft_version: _Optional[str] = ..., max_depth: _Optional[int] = ..., max_width: _Optional[int] = ..., max_context: _Optional[int] = ..., max_sessions: _Optional[int] = ..., lease_s: _Optional[float] = ..., level_times: _Optional[_Iterable[_Union[LevelTime, _Mapping]]] = ..., catchup_times: _Optional[_Iterable[_Union[CatchupTime, _Mapping]]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("code", "message", "session", "epoch", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    session: int
    epoch: int
    retry_after_s: float
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., session: _Optional[int] = ..., epoch: _Optional[int] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("session", "epoch", "tokens", "seed", "choice", "temperature", "top_k", "top_p", "min_p")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    choice: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("session", "epoch", "round", "base", "tokens", "depth", "width", "calibrated", "due_s", "give_up_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    CALIBRATED_FIELD_NUMBER: _ClassVar[int]
    DUE_S_FIELD_NUMBER: _ClassVar[int]
    GIVE_UP_S_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    round: int
    base: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    depth: int
    width: int
    calibrated: bool
    due_s: float
    give_up_s: float
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., base: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., depth: _Optional[int] = ..., width: _Optional[int] = ..., calibrated: bool = ..., due_s: _Optional[float] = ..., give_up_s: _Optional[float] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    def __init__(self, session: _Optional[int] = ...) -> None: ...

class Tree(_message.Message):
    __slots__ = ("session", "epoch", "round", "length", "width", "nodes", "log_q", "queue_s", "service_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    LOG_Q_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    SERVICE_S_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    round: int
    length: int
    width: int
    nodes: bytes
    log_q: bytes
    queue_s: float
    service_s: float
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., length: _Optional[int] = ..., width: _Optional[int] = ..., nodes: _Optional[bytes] = ..., log_q: _Optional[bytes] = ..., queue_s: _Optional[float] = ..., service_s: _Optional[float] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ("session", "epoch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("busy", "queue_s", "sessions", "targets")
    BUSY_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    busy: float
    queue_s: float
    sessions: int
    targets: int
    def __init__(self, busy: _Optional[float] = ..., queue_s: _Optional[float] = ..., sessions: _Optional[int] = ..., targets: _Optional[int] = ...) -> None: ...
