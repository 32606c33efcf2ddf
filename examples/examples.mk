# SPDX-License-Identifier: Apache-2.0
# The examples in other languages, in build/examples: stubs out of proto/, then one program each. Included by Makefile.

LANGUAGES := typescript go java cpp
BUILT     := $(LANGUAGES:%=build/examples/%/.built)
# google.rpc, for the details of errors; grpcio-status brings it.
RPC_PROTO  = $(dir $(shell $(PY) -c 'import google.rpc; print(list(google.rpc.__path__)[0])'))
OUR_PROTOS := $(PROTOS:proto/%=%)
RPC_PROTOS := google/rpc/status.proto google/rpc/error_details.proto

# What Debian 12 calls them. nodejs and npm: 20.15 or newer, from Debian 13 or nodejs.org.
TOOLS := protoc grpc_cpp_plugin grpc_java_plugin protoc-gen-go go g++ javac pkg-config
TOOL_FILES := $(addprefix /usr/share/java/,grpc-netty.jar protobuf.jar netty-transport.jar geronimo-annotation-1.3-spec.jar) \
	/usr/share/gocode/src/google.golang.org/grpc /usr/include/grpcpp/grpcpp.h
DEBIAN_TOOLS := g++ pkg-config protobuf-compiler protobuf-compiler-grpc libgrpc++-dev golang-go golang-google-grpc-dev \
	protoc-gen-go-1-3 default-jdk-headless protobuf-compiler-grpc-java-plugin libgrpc-java libprotobuf-java \
	libnetty-java libperfmark-java libgeronimo-annotation-1.3-spec-java

.PHONY: example-tools stubs examples

example-tools: ## install what the examples in Go, Java and C++ are built with (Debian packages; needs root)
	apt-get update
	DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(DEBIAN_TOOLS)

stubs: $(LANGUAGES:%=build/examples/%/.stubs) ## stubs of proto/ in build/examples/{typescript,go,java,cpp}

examples: $(BUILT) ## build the examples in TypeScript, Go, Java and C++

# Root gets what is missing; others are told.
build/examples/.tools:
	@missing() { for tool in $(TOOLS); do command -v $$tool >/dev/null || echo $$tool; done; \
		for file in $(TOOL_FILES); do test -e $$file || echo $$file; done; }; \
	if test -z "$$(missing)"; then exit 0; \
	elif test "$$(id -u)" = 0; then $(MAKE) --no-print-directory example-tools; \
	else echo "missing:" $$(missing)"; run make example-tools as root"; exit 1; fi
	@command -v npm >/dev/null || { echo "npm is missing: install Node.js 20.15 or newer"; exit 1; }
	@mkdir -p $(@D) && touch $@

build/examples/typescript/.npm: examples/typescript/package.json examples/typescript/package-lock.json
	@mkdir -p $(@D) && cp $^ $(@D)
	cd $(@D) && npm ci --no-audit --no-fund --loglevel=error
	@touch $@

build/examples/typescript/.stubs: $(PROTOS) build/examples/typescript/.npm | build/examples/.tools $(STAMP)
	rm -rf $(@D)/stubs && mkdir -p $(@D)/stubs
	protoc -I proto -I $(RPC_PROTO).. --plugin=$(@D)/node_modules/.bin/protoc-gen-ts_proto --ts_proto_out=$(@D)/stubs \
		--ts_proto_opt=outputServices=grpc-js,esModuleInterop=true,importSuffix=.js,env=node,forceLong=bigint \
		$(OUR_PROTOS) $(RPC_PROTOS)
	@touch $@

build/examples/typescript/.built: examples/typescript/client.ts examples/typescript/tsconfig.json build/examples/typescript/.stubs
	cp $(filter examples/%,$^) $(@D)
	cd $(@D) && node_modules/.bin/tsc
	@touch $@

# One Go package; Debian's protoc-gen-go 1.3 is the one whose code its golang-google-grpc-dev runs.
GO_MAPS := $(subst $(eval) ,,$(OUR_PROTOS:%=,M%=kvgrpc/v1))

build/examples/go/.stubs: $(PROTOS) | build/examples/.tools
	mkdir -p $(@D)/src
	protoc -I proto --go_out=plugins=grpc,paths=source_relative,import_path=kvgrpc/v1$(GO_MAPS):$(@D)/src $(OUR_PROTOS)
	@touch $@

build/examples/go/.built: examples/go/client.go build/examples/go/.stubs
	mkdir -p $(@D)/src/client && cp $< $(@D)/src/client
	cd $(@D) && GO111MODULE=off GOCACHE=$(CURDIR)/$(@D)/cache GOPATH=$(CURDIR)/$(@D):/usr/share/gocode go build -o client client
	@touch $@

JAVA_PATH := $(subst $(eval) ,:,$(addprefix /usr/share/java/,$(addsuffix .jar,\
	$(addprefix grpc-,api context core netty stub protobuf protobuf-lite) protobuf guava failureaccess perfmark-api \
	geronimo-annotation-1.3-spec $(addprefix netty-,buffer codec codec-http codec-http2 common handler resolver \
	transport transport-native-epoll transport-native-unix-common))))

build/examples/java/.stubs: $(PROTOS) | build/examples/.tools $(STAMP)
	rm -rf $(@D)/stubs && mkdir -p $(@D)/stubs
	protoc -I proto -I $(RPC_PROTO).. --plugin=protoc-gen-grpc-java=$$(command -v grpc_java_plugin) \
		--java_out=$(@D)/stubs --grpc-java_out=$(@D)/stubs $(OUR_PROTOS)
	protoc -I $(RPC_PROTO).. --java_out=$(@D)/stubs $(RPC_PROTOS)
	@touch $@

build/examples/java/.built: examples/java/Client.java build/examples/java/.stubs
	mkdir -p $(@D)/classes
	javac -nowarn -d $(@D)/classes -cp $(JAVA_PATH):$(@D)/stubs -sourcepath $(@D)/stubs $<
	printf '#!/bin/sh\nexec java -cp %s:%s Client "$$@"\n' $(CURDIR)/$(@D)/classes $(JAVA_PATH) > $(@D)/client
	chmod +x $(@D)/client
	@touch $@

build/examples/cpp/.stubs: $(PROTOS) | build/examples/.tools $(STAMP)
	rm -rf $(@D)/stubs && mkdir -p $(@D)/stubs
	protoc -I proto --plugin=protoc-gen-grpc=$$(command -v grpc_cpp_plugin) \
		--cpp_out=$(@D)/stubs --grpc_out=$(@D)/stubs $(OUR_PROTOS)
	protoc -I $(RPC_PROTO).. --cpp_out=$(@D)/stubs $(RPC_PROTOS)
	@touch $@

build/examples/cpp/.built: examples/cpp/client.cpp build/examples/cpp/.stubs
	$(CXX) -std=c++17 -Wall -Wextra -I $(@D)/stubs -o $(@D)/client $< $$(find $(@D)/stubs -name '*.cc') $$(pkg-config --cflags --libs grpc++ protobuf)
	@touch $@
