"""The shape of the house: which package may know which."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = [name for name in ("app", "auth", "cache", "routing") if (ROOT / name).is_dir()]


def imports_of(path: Path) -> set[str]:
    """Top-level names of all absolute imports, those inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def test_imports_point_one_way() -> None:
    for package in set(PACKAGES) - {"app"}:
        for module in modules(package):
            assert not imports_of(module) & (set(PACKAGES) - {package}), module


def test_each_heavy_library_has_one_room() -> None:
    rooms = {
        "vllm": {"app/engines/embedded.py", "app/engines/vllm_options.py"},
        "prometheus_client": {f"app/metrics/{name}.py" for name in ("registry", "requests", "parts", "routing")},
        "uvicorn": {"app/server.py", "app/connections.py"},
        "sse_starlette": {"app/sse.py"},
        "fastapi": {
            "app/endpoints.py",
            "app/cache_endpoints.py",
            "app/routing_endpoints.py",
            "app/console_endpoints.py",
            "app/callers.py",
            "app/gateway.py",
        },
        "httptools": {"app/engines/http_client.py"},
        "torch": {"app/builtin_model.py"},
        "jwt": {"auth/tokens.py", "auth/provider.py", "app/security.py"},
        "aiohttp": {"auth/provider.py"},
        "redis": {"app/redis_link.py", "app/redis_transport.py"},
        "lmdb": {"cache/disk.py"},
        "zstandard": {"cache/disk.py"},
        "cachetools": {"cache/memory.py"},
        "transformers": {"app/builtin_model.py"},
        "opentelemetry": {"app/tracing.py"},
        "pynvml": {"app/gpu.py"},
    }
    for package in PACKAGES:
        for module in modules(package):
            name = module.relative_to(ROOT).as_posix()
            for library in imports_of(module) & set(rooms):
                assert name in rooms[library], f"{name} imports {library}"


def test_only_settings_reads_the_environment() -> None:
    for package in PACKAGES:
        for module in modules(package):
            text = module.read_text()
            # app/engines/vllm_options.py sets what vLLM reads, and respects what is set.
            if module.name != "vllm_options.py" and module.parent.name != "settings":
                assert "os.environ" not in text, module
                assert "getenv" not in text, module


def test_modules_stay_readable() -> None:
    for package in PACKAGES:
        for module in modules(package):
            assert len(module.read_text().splitlines()) < 500, module


def test_no_task_without_an_owner_and_no_middleware_that_hides_disconnects() -> None:
    for package in PACKAGES:
        for module in modules(package):
            assert "BaseHTTPMiddleware" not in module.read_text(), module
            for node in ast.walk(ast.parse(module.read_text())):
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                    called = ast.unparse(node.value.func)
                    if called.endswith("group.create_task"):  # a group is an owner
                        continue
                    assert called.rpartition(".")[2] not in ("create_task", "ensure_future"), f"{module}: {called}"
