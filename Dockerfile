# Two images from one file: `docker build -t adaserve .` for a CPU, `docker build --build-arg EXTRAS=server,gpu -t
# adaserve:gpu .` with CUDA 12's libraries in it, which needs NVIDIA's container toolkit to run. The image for a CPU holds
# g++: the kernels for CPUs are compiled at the first start, for the processor that it runs on. docs/deploy.md says more.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG EXTRAS=server
WORKDIR /src
RUN python -m venv /opt/adaserve
COPY pyproject.toml README.md LICENSE ./
COPY adaserve_jax adaserve_jax
RUN /opt/adaserve/bin/pip install --no-cache-dir --disable-pip-version-check ".[${EXTRAS}]"

FROM python:${PYTHON}-slim AS serve
ARG EXTRAS=server
RUN case ",${EXTRAS}," in *,gpu,*) ;; *) \
      apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* ;; esac
RUN useradd --system --uid 10001 --user-group --create-home --home-dir /var/lib/adaserve adaserve \
 && install -d -o adaserve -g adaserve /var/cache/adaserve
COPY --from=build /opt/adaserve /opt/adaserve
ENV PATH=/opt/adaserve/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    ADASERVE_COMPILE_CACHE=/var/cache/adaserve \
    NUMBA_CACHE_DIR=/var/cache/adaserve/numba \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /var/lib/adaserve
VOLUME /var/cache/adaserve
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 \
  CMD ["python", "-m", "adaserve_jax.server.probe", "/health"]
ENTRYPOINT ["adaserve"]
# All addresses of the container: who reaches them is decided by what publishes the port.
CMD ["serve", "--host", "0.0.0.0", "--exit-when-dead"]
